//! The machines of this node, and what they need of the host: an engine that runs them, a network
//! slot for each, directories, room in RAM and on disk.
//!
//! A machine begins as a VM that is prepared over a memory image ([`Fleet::prepare`]) and thawed
//! into ([`Fleet::thaw`]), or, while a template is baked, with a boot. If any step fails, nothing
//! is left behind.

use crate::{
    admission::{Admission, DiskRoom, Ticket},
    error::{Error, Result},
    network::{Network, Slot},
    sandbox::Live,
    store::{Store, make_dir},
};
use keiki_engine::{BootSpec, Engine, EngineError, Frozen, Image, Machine, PreparedVm, VmPaths};
use keiki_sys::stopwatch::Stopwatch;
use keiki_types::{SandboxId, Shape, Sharing};
use std::{path::Path, sync::Arc, time::Duration};
use tokio::sync::Semaphore;

/// Bytes of the guest's console to show with a failure: enough for a whole kernel panic.
pub(crate) const CONSOLE_TAIL: usize = 4096;
/// Machines to start or release at the same time, per CPU.
const STARTING_PER_CPU: usize = 3;

/// Makes machines and ends them.
pub(crate) struct Fleet {
    pub engine: Arc<dyn Engine>,
    pub network: Network,
    pub admission: Admission,
    /// On the store.
    pub room: DiskRoom,
    store: Store,
    sharing: Sharing,
    starting: Semaphore,
}

/// A VM that waits for a frozen machine, with its directories and its network.
pub(crate) struct Prepared {
    pub id: SandboxId,
    pub vm: PreparedVm,
    pub slot: Slot,
}

/// A running machine whose guest is not released yet.
pub(crate) struct Unreleased {
    pub id: SandboxId,
    pub machine: Box<dyn Machine>,
    pub slot: Slot,
}

impl Fleet {
    pub fn new(
        engine: Arc<dyn Engine>,
        network: Network,
        store: Store,
        sharing: Sharing,
        admission: Admission,
    ) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            engine,
            network,
            admission,
            room: DiskRoom::default(),
            store,
            sharing,
            starting: Semaphore::new(STARTING_PER_CPU * cpus),
        }
    }

    /// Starting or releasing more than a few machines per CPU at the same time would only delay all
    /// of them.
    pub async fn permit(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        self.starting.acquire().await.ok()
    }

    /// Reserves space on the store, for as long as the operation runs.
    pub fn reserve_disk(&self, bytes: u64) -> Result<Ticket> {
        self.room.reserve(bytes, || self.store.free_bytes())
    }

    /// The paths that the machine of this sandbox owns.
    pub fn paths(&self, id: SandboxId, slot: Option<&Slot>) -> VmPaths {
        VmPaths {
            dir: self.store.sandbox(id),
            run_dir: self.store.run(id),
            netns: slot.and_then(Slot::netns_path),
        }
    }

    /// A memory image in a new directory, for a freeze to fill.
    pub async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> {
        make_dir(dir)?;
        self.engine
            .image(dir, shape)
            .await
            .map_err(|error| engine_error("cannot create a memory image", error))
    }

    /// Opens a frozen machine whose memory may be shared in this scope, limited to the node's own.
    pub async fn load(&self, dir: &Path, sharing: Sharing) -> Result<Arc<dyn Frozen>> {
        let loaded = self.engine.load(dir, sharing.min(self.sharing)).await;
        loaded.map_err(|error| engine_error("the snapshot cannot be loaded", error))
    }

    /// Makes a frozen machine durable.
    pub async fn persist(&self, frozen: &dyn Frozen) -> Result<()> {
        let done = frozen.persist().await;
        done.map(drop).map_err(|error| engine_error("the snapshot cannot be written", error))
    }

    /// Prepares a VM over a memory image.
    pub async fn prepare(&self, id: SandboxId, image: &Image) -> Result<Prepared> {
        let _permit = self.permit().await;
        let (slot, paths) = self.allot(id).await?;
        match self.engine.prepare(image, paths).await {
            Ok(vm) => Ok(Prepared { id, vm, slot }),
            Err(error) => {
                self.clear(id, Some(slot)).await;
                Err(engine_error("cannot start a monitor", error))
            }
        }
    }

    /// Cancels a prepared VM.
    pub async fn cancel(&self, prepared: Prepared) {
        prepared.vm.cancel().await;
        self.clear(prepared.id, Some(prepared.slot)).await;
    }

    /// Thaws a frozen machine into a prepared VM.
    pub async fn thaw(
        &self,
        frozen: &dyn Frozen,
        prepared: Prepared,
        watch: &mut Stopwatch,
    ) -> Result<Unreleased> {
        let Prepared { id, vm, slot } = prepared;
        match frozen.thaw(vm).await {
            Ok((machine, steps)) => {
                for (step, took) in steps.0 {
                    watch.note(step, took);
                }
                watch.lap("thaw");
                Ok(Unreleased { id, machine, slot })
            }
            Err(error) => {
                self.clear(id, Some(slot)).await;
                Err(engine_error("the machine cannot be thawed", error))
            }
        }
    }

    /// Boots a machine from nothing.
    pub async fn boot(&self, id: SandboxId, spec: &BootSpec) -> Result<Unreleased> {
        let (slot, paths) = self.allot(id).await?;
        match self.engine.boot(spec, paths).await {
            Ok(machine) => Ok(Unreleased { id, machine, slot }),
            Err(error) => {
                self.clear(id, Some(slot)).await;
                Err(engine_error("the template cannot be booted", error))
            }
        }
    }

    /// Ends the machine of a sandbox.
    pub async fn end(&self, live: &Live) {
        live.guest.close();
        let slot = live.slot.lock().take();
        self.end_machine(live.id, live.machine.as_ref(), slot).await;
    }

    /// Ends a machine and reclaims everything it had.
    pub async fn end_machine(&self, id: SandboxId, machine: &dyn Machine, slot: Option<Slot>) {
        if let Err(error) = machine.stop().await {
            tracing::error!(%id, error = &error as &dyn std::error::Error, "cannot end a monitor");
        }
        self.clear(id, slot).await;
    }

    /// Removes a machine's directories and returns its slot.
    pub async fn clear(&self, id: SandboxId, slot: Option<Slot>) {
        for dir in [self.store.sandbox(id), self.store.run(id)] {
            self.store.remove_or_log(dir).await;
        }
        if let Some(slot) = slot {
            self.network.give_back(slot).await;
        }
    }

    /// A network slot and directories for a machine.
    async fn allot(&self, id: SandboxId) -> Result<(Slot, VmPaths)> {
        let slot = self.network.take().await?;
        let paths = self.paths(id, Some(&slot));
        match make_dir(&paths.dir).and_then(|()| make_dir(&paths.run_dir)) {
            Ok(()) => Ok((slot, paths)),
            Err(error) => {
                self.clear(id, Some(slot)).await;
                Err(error)
            }
        }
    }
}

/// An engine's failure as the API reports it.
pub(crate) fn engine_error(what: &str, error: EngineError) -> Error {
    match error {
        EngineError::NoSpace(_) => Error::NoRoom(format!("{what}: insufficient host storage for sandbox")),
        EngineError::Refused { ref why, .. } => {
            Error::Conflict(format!("{what}: the snapshot cannot be used: {why}"))
        }
        error => Error::internal(format!("{what}: {error}"), error),
    }
}

/// Adds the end of the guest's console, which has the reason if the guest caused the failure.
pub(crate) async fn with_console(error: Error, machine: &dyn Machine) -> Error {
    let tail = tokio::time::timeout(Duration::from_secs(2), machine.console(CONSOLE_TAIL)).await;
    let tail = String::from_utf8_lossy(&tail.unwrap_or_default()).trim().to_owned();
    match error {
        Error::Internal { what, cause, .. } if !tail.is_empty() => {
            Error::Internal { what, console: Some(tail), cause }
        }
        error => error,
    }
}
