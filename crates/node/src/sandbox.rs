//! One sandbox in memory: its record, its machine while it has one, and which operations may run at
//! the same time.
//!
//! Two locks, always taken in this order:
//!
//! - [`Sandbox::verb`] serialises the verbs that change what the sandbox is (pause, freeze, delete,
//!   ...).
//! - `state` is held for moments: it decides, atomically, whether a use begins or the sweeper
//!   claims the sandbox, so that a request that arrived first always wins.

use crate::{
    admission::Ticket,
    error::{Error, Result},
    guest::link::{GuestLink, refusal as guest_refusal},
    lifecycle::{self, Arrival, Decision, IdleTracker, Sweep, Verb},
    network::Slot,
    records::{SandboxRecord, rfc3339},
};
use keiki_engine::Machine;
use keiki_protocol::guest::guest_client::GuestClient;
use keiki_types::{SandboxId, Status, api};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tonic::transport::Channel;

/// In a record's `error`, separates how a machine ended from the end of its guest's console.
pub const CONSOLE_MARK: &str = "; the console ends with:\n";

/// A sandbox that the node knows. `L` is its machine: the locking does not depend on its type.
pub struct Sandbox<L = Live> {
    /// Id.
    pub id: SandboxId,
    /// Held by the one verb that is changing it.
    pub verb: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<State<L>>,
}

struct State<L> {
    record: SandboxRecord,
    live: Option<Arc<L>>,
    idle: IdleTracker,
}

/// The machine of a running or paused sandbox.
pub struct Live {
    pub id: SandboxId,
    /// What the engine runs.
    pub machine: Box<dyn Machine>,
    /// The way to its agent.
    pub guest: GuestLink,
    /// Its network; taken out once, when the machine has ended.
    pub slot: Mutex<Option<Slot>>,
    /// Its reservation on this host, released with it.
    pub _ticket: Ticket,
}

/// A use under way: as long as it exists the sandbox is not idle.
pub struct Use<L = Live> {
    sandbox: Arc<Sandbox<L>>,
    /// The machine it may use.
    pub live: Arc<L>,
}

/// How long the node may take to notice that a machine has ended.
const NOTICE_LIMIT: Duration = Duration::from_secs(2);

impl Use {
    /// Calls the guest with something that may be repeated over a new connection.
    pub async fn call<R, T, F>(&self, request: R, send: impl Fn(GuestClient<Channel>, R) -> F) -> Result<T>
    where
        R: Clone,
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        match self.live.guest.call(request, send).await {
            Ok(answer) => Ok(answer),
            Err(status) => Err(self.explain(guest_refusal(&status)).await),
        }
    }

    /// What happened to the machine, for a request that failed because of it: an internal error if
    /// the machine still exists.
    pub async fn explain(&self, error: Error) -> Error {
        if !matches!(error, Error::Internal { .. }) {
            return error;
        }
        let begun = Instant::now();
        loop {
            let (status, is_there) = {
                let state = self.sandbox.state.lock();
                let is_there = state.live.as_ref().is_some_and(|live| Arc::ptr_eq(live, &self.live));
                (state.record.status, is_there)
            };
            let what = match status {
                Status::Stopping | Status::Deleted => "was deleted",
                Status::Failed => "has failed",
                _ if !is_there => "was hibernated",
                _ => {
                    let ended = tokio::time::timeout(Duration::from_millis(50), self.live.machine.ended());
                    if ended.await.is_err() || begun.elapsed() > NOTICE_LIMIT {
                        return error;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let what = format!("sandbox {} {what} while the operation ran", self.sandbox.id);
            return match status {
                Status::Failed => Error::Failed { what, console: console_of(&self.sandbox.record()) },
                _ => Error::Conflict(what),
            };
        }
    }
}

impl<L> Drop for Use<L> {
    fn drop(&mut self) {
        self.sandbox.state.lock().idle.depart(Instant::now());
    }
}

/// What the sweeper has claimed.
pub struct Claim {
    /// To be done now.
    pub verdict: Sweep,
    /// What it was until then.
    pub before: Status,
    /// Held until that is done.
    pub verb: tokio::sync::OwnedMutexGuard<()>,
}

impl<L> Sandbox<L> {
    /// A sandbox as recorded, with its machine if it has one.
    pub fn new(record: SandboxRecord, live: Option<Arc<L>>) -> Arc<Self> {
        Arc::new(Self {
            id: record.id,
            verb: Arc::default(),
            state: Mutex::new(State { record, live, idle: IdleTracker::new(Instant::now()) }),
        })
    }

    /// The record now.
    pub fn record(&self) -> SandboxRecord {
        self.state.lock().record.clone()
    }

    /// The machine, if there is one.
    pub fn live(&self) -> Option<Arc<L>> {
        self.state.lock().live.clone()
    }

    /// Begins a use (exec, files, terminal). A hibernated sandbox is woken with `wake`, which takes
    /// the verb; if it is being hibernated, this waits.
    pub async fn begin<F: Future<Output = Result<()>>>(
        self: &Arc<Self>,
        wake: impl Fn() -> F,
    ) -> Result<Use<L>> {
        loop {
            let must_wake = {
                // One step, atomically against the sweeper.
                let mut state = self.state.lock();
                let status = state.record.status;
                match (state.idle.arrive(status, Instant::now()), state.live.clone()) {
                    (Arrival::Begun, Some(live)) => return Ok(Use { sandbox: Arc::clone(self), live }),
                    (Arrival::Begun, None) => {
                        state.idle.depart(Instant::now());
                        return Err(refusal(&state.record, "has no machine"));
                    }
                    (Arrival::Refuse(why), _) => return Err(refusal(&state.record, why)),
                    (Arrival::WakeFirst, _) => true,
                    (Arrival::Wait, _) => false,
                }
            };
            if must_wake {
                wake().await?;
            } else {
                drop(self.verb.lock().await);
            }
        }
    }

    /// What a verb may do now. Call with [`Sandbox::verb`] held.
    pub fn decide(&self, verb: Verb) -> Result<Decision> {
        let state = self.state.lock();
        match lifecycle::decide(state.record.status, verb) {
            Decision::Refuse(why) => Err(refusal(&state.record, why)),
            decision => Ok(decision),
        }
    }

    /// If its TTL has expired, claims it for the sweeper: from then on no use can start. Not while
    /// a verb is changing it: that is activity, and the next sweep checks again.
    #[must_use]
    pub fn claim_if_idle(&self) -> Option<Claim> {
        let verb = Arc::clone(&self.verb).try_lock_owned().ok()?;
        let mut state = self.state.lock();
        let (before, ttl, persistent) =
            (state.record.status, state.record.ttl_seconds, state.record.persistent);
        let verdict = state.idle.sweep(before, Instant::now(), ttl, persistent);
        if verdict == Sweep::Delete {
            state.record.status = Status::Stopping;
        }
        (verdict != Sweep::Keep).then_some(Claim { verdict, before, verb })
    }

    /// Changes the record, in memory; returns the new one to be written.
    pub fn update(&self, change: impl FnOnce(&mut SandboxRecord)) -> SandboxRecord {
        let mut state = self.state.lock();
        change(&mut state.record);
        state.record.clone()
    }

    /// Sets its machine and its state together.
    pub fn set_live(&self, live: Option<Arc<L>>, change: impl FnOnce(&mut SandboxRecord)) -> SandboxRecord {
        let mut state = self.state.lock();
        state.live = live;
        state.idle.touch(Instant::now());
        change(&mut state.record);
        state.record.clone()
    }

    /// From now on new uses wait: its machine is about to be taken away, or no longer.
    pub fn set_leaving(&self, leaving: bool) {
        self.state.lock().idle.set_leaving(leaving);
    }

    /// Counts as activity.
    pub fn touch(&self) {
        self.state.lock().idle.touch(Instant::now());
    }

    /// Since the last activity; zero while something is in flight.
    pub fn idle(&self) -> Duration {
        self.state.lock().idle.idle(Instant::now())
    }
}

impl Sandbox {
    /// As the API shows it, without memory use.
    pub fn view(&self) -> api::Sandbox {
        let idle = self.idle();
        let state = self.state.lock();
        let record = &state.record;
        let guest_ip = state
            .live
            .as_ref()
            .and_then(|live| live.slot.lock().as_ref().map(|slot| slot.outside().to_string()));
        api::Sandbox {
            id: record.id,
            template: record.template.clone(),
            template_version: record.template_version.clone(),
            cpu: record.shape.vcpus,
            memory_mb: record.shape.memory_mib,
            disk_mb: record.shape.disk_mib,
            status: record.status,
            guest_ip: guest_ip.unwrap_or_default(),
            created_at: rfc3339(record.created_at),
            metadata: record.metadata.clone(),
            from_snapshot: record.from_snapshot,
            boot_ms: record.boot_ms,
            boot_mode: record.origin.as_str().into(),
            persistent: record.persistent,
            ttl_seconds: record.ttl_seconds,
            idle_seconds: idle.as_secs(),
            parent_sandbox_id: record.parent_sandbox_id,
            parent_snapshot_id: record.parent_snapshot_id,
            generation: record.generation,
            engine: record.engine,
            memory: None,
            cpu_ms: None,
            timings: record.timings.clone(),
            error: record.error.clone(),
        }
    }
}

/// Why a record's state does not allow something; with the exit reason, if the machine exited.
fn refusal(record: &SandboxRecord, why: &str) -> Error {
    let what = format!("sandbox {} {why}", record.id);
    match record.status {
        Status::Failed => Error::Failed { what, console: console_of(record) },
        _ => Error::Conflict(what),
    }
}

/// The guest's last console output, if the machine exited.
pub fn console_of(record: &SandboxRecord) -> Option<String> {
    let (_, console) = record.error.as_deref()?.split_once(CONSOLE_MARK)?;
    Some(console.trim().to_owned())
}

#[cfg(test)]
mod tests;
