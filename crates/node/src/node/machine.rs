//! The one way a machine comes to life: a place is prepared, a frozen machine is thawed into it, and it is
//! released only after it has acknowledged its new identity. Create, fork, restore and wake are
//! this with another frozen machine.

use super::Inner;
use crate::{
    admission::Ticket,
    clock::Clock,
    error::{Error, Result},
    guest::{Gate, GuestLink, Secrets},
    records::SandboxRecord,
    sandbox::Live,
    store::make_dir,
};
use keiki_engine::{EngineError, Frozen, Image, Machine, PreparedVm, VmPaths};
use keiki_net::Slot;
use keiki_protocol::guest::Identity;
use keiki_types::{Origin, SandboxId};
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// How much of the guest's console a failure shows, in bytes: a kernel's last words, from what happened to its last line.
pub(super) const CONSOLE_TAIL: usize = 4096;

/// Where a machine will live: its directories, its network, and a monitor that waits.
pub(super) struct Place {
    pub id: SandboxId,
    prepared: PreparedVm,
    slot: Slot,
}

impl Place {
    /// Its monitor still waits.
    pub fn is_alive(&self) -> bool {
        self.prepared.is_alive()
    }
}

/// The identity of the machine that this record is of. The gate adds what changes with every release.
pub(super) fn identity_of(record: &SandboxRecord) -> Identity {
    let text = |id: Option<String>| id.unwrap_or_default();
    Identity {
        generation: record.generation,
        hostname: hostname(record.id),
        reason: record.origin.as_str().into(),
        sandbox_id: record.id.to_string(),
        parent_sandbox_id: text(record.parent_sandbox_id.map(|id| id.to_string())),
        parent_snapshot_id: text(record.parent_snapshot_id.map(|id| id.to_string())),
        is_new: record.origin != Origin::Wake,
        run_hooks: true,
        ..Identity::default()
    }
}

impl Inner {
    /// What the machine of this sandbox owns.
    pub(super) fn resources(&self, id: SandboxId, slot: Option<&Slot>) -> VmPaths {
        VmPaths {
            dir: self.store.sandbox(id),
            run_dir: self.store.run(id),
            netns: slot.map(Slot::netns_path),
        }
    }

    /// Directories and a network slot for a machine.
    pub(super) async fn ground(&self, id: SandboxId) -> Result<(Slot, VmPaths)> {
        let slot =
            self.slots.take().await.map_err(|cause| Error::internal("no network slot can be made", cause))?;
        let resources = self.resources(id, Some(&slot));
        let made = make_dir(&resources.dir).and_then(|()| make_dir(&resources.run_dir));
        match made {
            Ok(()) => Ok((slot, resources)),
            Err(error) => {
                self.clear_ground(id, Some(slot)).await;
                Err(error)
            }
        }
    }

    /// Prepares a place over a memory image.
    pub(super) async fn place(&self, id: SandboxId, image: &Image) -> Result<Place> {
        let _turn = self.starting.acquire().await;
        let (slot, resources) = self.ground(id).await?;
        match self.engine.prepare(image, resources).await {
            Ok(prepared) => Ok(Place { id, prepared, slot }),
            Err(error) => {
                self.clear_ground(id, Some(slot)).await;
                Err(engine_error("cannot start a monitor", error))
            }
        }
    }

    /// Gives a place up.
    pub(super) async fn vacate(&self, place: Place) {
        place.prepared.cancel().await;
        self.clear_ground(place.id, Some(place.slot)).await;
    }

    /// Thaws a frozen machine into a place and releases it. On error nothing of it is left.
    pub(super) async fn thaw(
        &self,
        frozen: &dyn Frozen,
        place: Place,
        identity: Identity,
        secrets: Secrets,
        ticket: Ticket,
        clock: &mut Clock,
    ) -> Result<Live> {
        let _turn = self.starting.acquire().await;
        let Place { id, prepared, slot } = place;
        let (machine, steps) = match frozen.thaw(prepared).await {
            Ok(thawed) => thawed,
            Err(error) => {
                self.clear_ground(id, Some(slot)).await;
                return Err(engine_error("the machine cannot be thawed", error));
            }
        };
        for (step, took) in steps.0 {
            clock.note(&step, took);
        }
        clock.lap("thaw");
        match self.release(machine.as_ref(), identity, secrets, clock).await {
            Ok(guest) => Ok(Live { machine, guest, slot: Mutex::new(Some(slot)), _ticket: ticket }),
            Err(error) => {
                let error = with_console(error, machine.as_ref()).await;
                self.end_machine(id, machine.as_ref(), Some(slot)).await;
                Err(error)
            }
        }
    }

    /// The release gate: user processes go on only once the guest acknowledged its new generation.
    async fn release(
        &self,
        machine: &dyn Machine,
        identity: Identity,
        secrets: Secrets,
        clock: &mut Clock,
    ) -> Result<GuestLink> {
        let socket = machine.agent_socket();
        let gate = tokio::select! {
            gate = Gate::open(&socket, identity.generation) => gate?,
            how = machine.ended() => {
                return Err(Error::internal(
                    "the machine ended before it could be released",
                    EngineError::Ended(how),
                ));
            }
        };
        clock.lap("connect");
        gate.release(identity, secrets, clock).await
    }

    /// Ends a machine and takes back everything it had.
    pub(super) async fn end_machine(&self, id: SandboxId, machine: &dyn Machine, slot: Option<Slot>) {
        if let Err(error) = machine.stop().await {
            tracing::error!(%id, error = &error as &dyn std::error::Error, "a monitor could not be ended");
        }
        self.clear_ground(id, slot).await;
    }

    /// Ends the machine of a sandbox.
    pub(super) async fn end_live(&self, id: SandboxId, live: &Live) {
        live.guest.close();
        let slot = live.slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.end_machine(id, live.machine.as_ref(), slot).await;
    }

    /// Removes a machine's directories and gives its slot back.
    pub(super) async fn clear_ground(&self, id: SandboxId, slot: Option<Slot>) {
        for dir in [self.store.sandbox(id), self.store.run(id)] {
            if let Err(error) = self.store.remove(dir).await {
                tracing::error!(%id, error = &error as &dyn std::error::Error, "a directory was left behind");
            }
        }
        if let Some(slot) = slot {
            self.slots.give_back(slot).await;
        }
    }
}

/// What a guest calls itself: distinct for every sandbox, a valid DNS label.
pub(super) fn hostname(id: SandboxId) -> String {
    let id = id.to_string();
    format!("keiki-{}", id.rsplit('-').next().unwrap_or(&id))
}

/// An engine's failure as the API reports it.
pub(super) fn engine_error(what: &str, error: EngineError) -> Error {
    match error {
        EngineError::NoSpace(_) => Error::NoRoom(format!("{what}: insufficient host storage for sandbox")),
        EngineError::Refused { ref why, .. } => {
            Error::Conflict(format!("{what}: the snapshot cannot be used: {why}"))
        }
        error => Error::internal(format!("{what}: {error}"), error),
    }
}

/// Adds the end of the guest's console: for who caused the failure, that is where the reason stands.
pub(super) async fn with_console(error: Error, machine: &dyn Machine) -> Error {
    let tail = tokio::time::timeout(Duration::from_secs(2), machine.console(CONSOLE_TAIL)).await;
    let tail = String::from_utf8_lossy(&tail.unwrap_or_default()).trim().to_owned();
    match error {
        Error::Internal { what, cause, .. } if !tail.is_empty() => {
            Error::Internal { what, console: Some(tail), cause }
        }
        error => error,
    }
}
