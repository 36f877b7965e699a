//! A freeze around a running guest, in this order:
//!
//! 1. the guest flushes its disk, while everything runs;
//! 2. it freezes its user processes;
//! 3. secrets that the copy must not have leave the machine;
//! 4. the engine parks the vCPUs, takes RAM, device state and disk at one instant, and lets the
//!    vCPUs run;
//! 5. the secrets are put back;
//! 6. the guest thaws its user processes.
//!
//! If a step fails, the original still continues: steps 5 and 6 always run. A pause is steps 1 and
//! 2.

use crate::{
    daemon::Inner,
    error::{Error, Result},
    fleet::engine_error,
    guest::GuestLink,
    guest::secrets::Out,
    sandbox::{Live, Sandbox},
    timings::{ms, timings},
};
use keiki_engine::{Frozen, Image, Machine};
use keiki_sys::stopwatch::Stopwatch;
use keiki_types::{
    Shape, Status,
    api::{EventKind, Timings},
};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Disk space that a running machine needs before it writes anything.
const MACHINE_DISK_BYTES: u64 = 8 << 20;

/// The result of a freeze.
pub(crate) struct Taken {
    pub frozen: Arc<dyn Frozen>,
    pub pause: Pause,
}

/// How long the original was paused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pause {
    pub vcpu: Duration,
    /// None: its user processes were frozen before, or stay frozen.
    pub user: Option<Duration>,
}

impl Pause {
    /// The times of a verb that paused a machine for this long.
    pub fn of_verb(self, watch: &Stopwatch) -> Timings {
        self.add_to(timings(watch))
    }

    pub fn add_to(self, timings: Timings) -> Timings {
        Timings { vcpu_pause_ms: Some(ms(self.vcpu)), user_pause_ms: self.user.map(ms), ..timings }
    }
}

/// What happens to the original after the freeze.
pub(crate) enum After<'a> {
    /// It continues, and the copy has everything it has.
    GoesOn,
    /// It continues. The copy does not have these secrets; meanwhile they are in its run directory.
    KeepsSecrets(&'a [String], &'a Path),
    Ends,
}

/// A guest whose disk is flushed and whose user processes are frozen.
pub(crate) struct Still<'a> {
    guest: &'a GuestLink,
    since: Instant,
}

impl<'a> Still<'a> {
    pub async fn hold(guest: &'a GuestLink, watch: &mut Stopwatch) -> Result<Self> {
        guest.flush().await?;
        watch.lap("flush");
        let since = Instant::now();
        guest.freeze_user().await?;
        watch.lap("freeze_user");
        Ok(Self { guest, since })
    }

    /// Thaws the user processes; returns how long they were frozen.
    pub async fn release(self, watch: &mut Stopwatch) -> Result<Duration> {
        let thawed = self.guest.thaw_user().await;
        let stood = self.since.elapsed();
        watch.lap("thaw_user");
        thawed.map(|()| stood)
    }
}

/// Freezes a running machine into `image`.
pub(crate) async fn freeze(
    machine: &dyn Machine,
    guest: &GuestLink,
    image: Image,
    after: After<'_>,
    watch: &mut Stopwatch,
) -> Result<Taken> {
    let still = Still::hold(guest, watch).await?;
    let mut out = None;
    let taken = async {
        if let After::KeepsSecrets(secrets, run_dir) = after {
            out = Some(Out::take(guest, secrets, run_dir).await?);
            watch.lap("take_secrets");
        }
        freeze_vcpus(machine, image, watch).await
    };
    let taken = taken.await;
    if taken.is_ok() && matches!(after, After::Ends) {
        return taken;
    }
    let put_back = match out {
        Some(out) => {
            let put_back = out.put_back(guest).await;
            watch.lap("put_secrets");
            put_back
        }
        None => Ok(()),
    };
    let stood = still.release(watch).await?;
    put_back?;
    let Taken { frozen, pause } = taken?;
    Ok(Taken { frozen, pause: Pause { user: Some(stood), ..pause } })
}

/// Freezes a machine whose user processes are frozen, or that is paused.
async fn freeze_vcpus(machine: &dyn Machine, image: Image, watch: &mut Stopwatch) -> Result<Taken> {
    let (frozen, report) =
        machine.freeze(image).await.map_err(|error| engine_error("the machine cannot be frozen", error))?;
    watch.lap("freeze");
    for (step, took) in report.steps.0 {
        watch.note(format!("freeze:{step}"), took);
    }
    Ok(Taken { frozen, pause: Pause { vcpu: report.vcpu_pause, user: None } })
}

/// Disk for a frozen machine whose RAM is all private, and for its copies.
pub(crate) fn disk_bytes(shape: Shape, copies: usize) -> u64 {
    (u64::from(shape.memory_mib) << 20) + MACHINE_DISK_BYTES * (copies as u64 + 1)
}

impl Inner {
    /// Freezes a running or paused sandbox into `image`. Call with its verb held.
    pub(crate) async fn freeze(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        image: Image,
        after: After<'_>,
        watch: &mut Stopwatch,
    ) -> Result<Taken> {
        let taken = if sandbox.record().status == Status::Running {
            freeze(live.machine.as_ref(), &live.guest, image, after, watch).await?
        } else if let After::KeepsSecrets(..) = after {
            // Its guest does not answer.
            return Err(Error::Conflict(format!(
                "sandbox {} is paused and has secrets that a snapshot must not have: resume it first",
                sandbox.id
            )));
        } else {
            // It was stopped in the same order when it was paused.
            freeze_vcpus(live.machine.as_ref(), image, watch).await?
        };
        self.journal.emit(sandbox.id, EventKind::Frozen, |event| event.ms = Some(ms(taken.pause.vcpu)));
        Ok(taken)
    }
}
