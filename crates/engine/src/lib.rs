//! What runs microVMs on a node, behind one trait.
//!
//! Two operations carry everything. **Freeze** takes RAM, device state and disk of a running
//! machine at one instant, and the machine keeps running. **Thaw** makes a new, independent machine
//! that continues from there, copy-on-write.
//!
//! ```text
//!   boot ──> Machine ──freeze──> Frozen ──thaw──> Machine          (fork: nothing else)
//!                                  │  ▲
//!                          persist │  │ load                       (snapshot, restore)
//!                                  ▼  │
//!                               snapshot directory
//! ```
//!
//! Starting a monitor costs more than filling it, so it is done ahead: a [`PreparedVm`] has its
//! network, its empty disk layer and its sockets, and waits for a frozen machine to be thawed into
//! it. It is bound to a memory [`Image`], which may exist before its contents do: a fork prepares
//! its children while the parent still runs.
//!
//! Nothing here knows about sandboxes, templates, users or HTTP.

#[cfg(test)]
extern crate self as keiki_engine;

mod cgroup;
mod common;
mod console;
mod error;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod files;
mod fsutil;
pub mod kvm;
mod layers;
mod machine;
mod overhead;
mod prepared;
mod process;
pub mod qemu;
mod record;
mod users;

pub use common::Common;
pub use error::{EngineError, Result};
pub use overhead::MONITOR_MIB;
pub use prepared::PreparedVm;
pub use users::{FIRST_USER, USERS};

use async_trait::async_trait;
use keiki_sys::stopwatch::Steps;
use keiki_types::{EngineKind, Shape, Sharing, api::MemoryUse};
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// What a first boot needs. All files are read, none is changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSpec {
    /// vCPUs, RAM, disk size.
    pub shape: Shape,
    /// Kernel (bzImage).
    pub kernel: PathBuf,
    /// Initial RAM file system with the guest agent.
    pub initrd: PathBuf,
    /// Raw root disk, the bottom layer of every descendant's chain.
    pub disk: PathBuf,
    /// Added to the engine's own kernel command line.
    pub cmdline: String,
}

/// The paths that one copy of a machine owns. The caller makes the directories; the engine fills
/// them, and [`Machine::stop`] leaves nothing of the engine's behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmPaths {
    /// On the store: memory image, disk layers, console log, the engine's record of the machine.
    pub dir: PathBuf,
    /// For sockets. Short: a socket's path has at most 107 bytes.
    pub run_dir: PathBuf,
    /// Network namespace with the tap, e.g. `/run/netns/keiki-1a2b-7`. None: no network device
    /// backend.
    pub netns: Option<PathBuf>,
}

/// What a freeze cost the original machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreezeReport {
    /// From the vCPUs parked to the vCPUs running again.
    pub vcpu_pause: Duration,
    /// What was done, in order.
    pub steps: Steps,
}

/// What an engine can do on this host, or why it cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    pub kind: EngineKind,
    /// It can run Linux guests here.
    pub usable: bool,
    /// Version of what does the work.
    pub version: String,
    /// One sentence, for `doctor`.
    pub note: String,
}

/// Something that runs machines.
#[async_trait]
pub trait Engine: Send + Sync {
    fn kind(&self) -> EngineKind;

    /// What it can do here.
    async fn probe(&self) -> Capabilities;

    /// Starts a machine from nothing. Returns once its vCPUs run.
    async fn boot(&self, spec: &BootSpec, paths: VmPaths) -> Result<Box<dyn Machine>>;

    /// Names a memory image in `dir` that a freeze will fill, so that VMs can be prepared before
    /// it. `dir` is new, empty, and on the store.
    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image>;

    /// Prepares a VM for a thaw of what `image` holds or will hold.
    async fn prepare(&self, image: &Image, paths: VmPaths) -> Result<PreparedVm>;

    /// Opens a snapshot directory and checks everything in it. Machines thawed from it share memory
    /// until they write to it, with machines of the same files and scope.
    async fn load(&self, dir: &Path, sharing: Sharing) -> Result<Arc<dyn Frozen>>;

    /// This directory is not going to be loaded again: releases what is kept for that. What was
    /// loaded can still be thawed.
    async fn forget(&self, _dir: &Path) {}

    /// Finds a machine again that an earlier process of the node started with these paths. None if
    /// it has ended: then what it left there is removed.
    async fn adopt(&self, paths: &VmPaths) -> Result<Option<Box<dyn Machine>>>;

    /// Adoption is complete: processes of the engine's users that belong to no adopted machine are
    /// killed.
    fn adoption_finished(&self) {}

    /// Ends what the engine keeps for later. Machines keep running, and frozen ones can still be
    /// thawed.
    async fn close(&self);
}

/// A named place for the memory of a frozen machine, and the shape its machines have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The directory of the frozen machine.
    pub dir: PathBuf,
    /// vCPUs, RAM, disk size.
    pub shape: Shape,
    /// Each machine over it has a copy: [`Sharing::None`].
    pub alone: bool,
}

/// A running or paused machine.
#[async_trait]
pub trait Machine: Send + Sync {
    /// Its paths.
    fn paths(&self) -> &VmPaths;

    /// vCPUs, RAM, disk size.
    fn shape(&self) -> Shape;

    /// Parks the vCPUs. It is not an error if they are parked already.
    async fn pause(&self) -> Result<()>;

    /// Lets the vCPUs run. It is not an error if they run already.
    async fn resume(&self) -> Result<()>;

    /// Takes RAM, device state and disk at one instant into `image`'s directory. The machine keeps
    /// running if it was, on a new top layer. On error it continues as before and the directory is
    /// empty. Durable only after [`Frozen::persist`].
    async fn freeze(&self, image: Image) -> Result<(Arc<dyn Frozen>, FreezeReport)>;

    /// Ends the machine at once and removes what the engine put into its directories. It is not an
    /// error if it has ended already.
    async fn stop(&self) -> Result<()>;

    /// Resolves when the machine has exited or was stopped with [`Machine::stop`]; describes how,
    /// for people.
    async fn ended(&self) -> String;

    /// Host memory behind it.
    async fn memory(&self) -> Result<MemoryUse>;

    /// CPU time that its monitor has used. None: it has ended.
    async fn cpu_time(&self) -> Result<Option<Duration>>;

    /// Unix stream socket of the agent port. One connection at a time.
    fn agent_socket(&self) -> PathBuf;

    /// The last bytes the guest wrote to its console, at most `limit`.
    async fn console(&self, limit: usize) -> Vec<u8>;
}

/// A machine at one instant, on this node. Costs no CPU. Dropping it frees nothing on disk: the
/// owner of the directory removes it; machines thawed from it do not notice.
#[async_trait]
pub trait Frozen: Send + Sync {
    /// Its directory and shape.
    fn image(&self) -> &Image;

    /// Makes a new machine out of a prepared VM. Returns once its vCPUs run. On error the prepared
    /// VM is gone.
    async fn thaw(&self, prepared: PreparedVm) -> Result<(Box<dyn Machine>, Steps)>;

    /// Makes the directory a durable, self-contained snapshot: everything flushed, manifest last.
    async fn persist(&self) -> Result<keiki_snapshot::Manifest>;
}
