//! The machine room: what runs a microVM on a node, behind one trait.
//!
//! Two operations carry everything. **Freeze** takes RAM, device state and disk of a running machine at one
//! instant, and the machine goes on. **Thaw** makes a new, independent machine that continues from there,
//! copy-on-write.
//!
//! ```text
//!   boot ──> Machine ──freeze──> Frozen ──thaw──> Machine          (fork: nothing else)
//!                                  │  ▲
//!                          persist │  │ load                       (snapshot, restore)
//!                                  ▼  │
//!                               snapshot directory
//! ```
//!
//! Starting a monitor costs more than filling it, so it may be done ahead: a [`Seat`] is a monitor process
//! that waits, in its own network namespace and with its own empty disk layer, for a frozen machine to be
//! thawed into it. A seat is bound to a memory [`Image`], which may exist before its contents do: that is how
//! a fork starts its children's monitors while the parent still runs.
//!
//! Nothing here knows sandboxes, templates, users or HTTP.

#[cfg(test)]
extern crate self as keiki_engine;

mod cgroup;
mod common;
mod console;
mod error;
mod files;
pub mod kvm;
mod layers;
mod process;
pub mod qemu;
mod record;
mod steps;
mod users;

pub use common::Common;
pub use error::{EngineError, Result};
pub use users::{FIRST_USER, USERS};

use async_trait::async_trait;
use keiki_types::{EngineKind, Shape, api::MemoryUse};
use serde::{Deserialize, Serialize};
use std::{
    any::Any,
    borrow::Cow,
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

/// What one copy of a machine owns alone. Whoever makes it makes the directories; the engine fills them and
/// [`Machine::stop`] leaves nothing of the engine's behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// On the store: memory image, disk layers, console log, the engine's record of the machine.
    pub dir: PathBuf,
    /// For sockets. Short: a socket's path has at most 107 bytes.
    pub run_dir: PathBuf,
    /// Network namespace with the tap, e.g. `/run/netns/keiki-1a2b-7`. None: no network device backend.
    pub netns: Option<PathBuf>,
}

/// How the steps of a freeze or thaw went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Steps(pub Vec<(Cow<'static, str>, Duration)>);

/// What a freeze cost the machine that went on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreezeReport {
    /// From the vCPUs parked to the vCPUs running again.
    pub vcpu_pause: Duration,
    /// Bytes of RAM written out.
    pub private_bytes: u64,
    /// In order.
    pub steps: Steps,
}

/// What an engine can do here, and why not if it cannot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Which.
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
    /// Which.
    fn kind(&self) -> EngineKind;

    /// What it can do here.
    async fn probe(&self) -> Capabilities;

    /// Starts a machine from nothing. Returns once its vCPUs run.
    async fn boot(&self, spec: &BootSpec, resources: Resources) -> Result<Box<dyn Machine>>;

    /// Names a memory image in `dir` that a freeze will fill, so that seats can be made before it. `dir` is
    /// new, empty, and on the store.
    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image>;

    /// Starts a monitor that waits for a thaw of what `image` holds or will hold.
    async fn seat(&self, image: &Image, resources: Resources) -> Result<Box<dyn Seat>>;

    /// Opens a snapshot directory. Everything in it is checked before it is believed. Machines thawed from it share
    /// memory, as long as they do not write it, with those of the same files and scope.
    async fn load(&self, dir: &Path, scope: SharingScope) -> Result<Arc<dyn Frozen>>;

    /// Nobody loads this directory any more: lets go what is kept for that. What was loaded can still be thawed.
    async fn forget(&self, _dir: &Path) {}

    /// Finds a machine again that an earlier process of the node started with these resources. None if it
    /// has ended; whatever it left in the resources is removed then.
    async fn adopt(&self, resources: &Resources) -> Result<Option<Box<dyn Machine>>>;

    /// Every machine that an earlier process of the node left was looked for with [`Engine::adopt`]: who is not known by now
    /// never will be.
    fn all_adopted(&self) {}

    /// Ends what the engine keeps for later. Machines run on, and frozen ones can still be thawed.
    async fn close(&self);
}

/// Among whom the memory of a stored machine may be shared until it is written.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SharingScope {
    /// Everybody on the node: what is in it is public.
    Node,
    /// Those of this name.
    Workspace(String),
    /// Nobody: each machine has its own copy.
    None,
}

/// A named place for the memory of a frozen machine, and the shape its machines have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The directory of the frozen machine.
    pub dir: PathBuf,
    /// vCPUs, RAM, disk size.
    pub shape: Shape,
    /// Each machine over it has a copy: [`SharingScope::None`].
    pub alone: bool,
}

/// A running or paused machine.
#[async_trait]
pub trait Machine: Send + Sync {
    /// What it owns.
    fn resources(&self) -> &Resources;

    /// vCPUs, RAM, disk size.
    fn shape(&self) -> Shape;

    /// Parks the vCPUs. Done already: no error.
    async fn pause(&self) -> Result<()>;

    /// Lets the vCPUs run. Running already: no error.
    async fn resume(&self) -> Result<()>;

    /// Takes RAM, device state and disk at one instant into `image`'s directory. The machine goes on running
    /// if it was, from a new top layer. On error it goes on as before and the directory holds nothing.
    /// Durable only after [`Frozen::persist`].
    async fn freeze(&self, image: Image) -> Result<(Arc<dyn Frozen>, FreezeReport)>;

    /// Ends the machine at once and removes what the engine put into its resources. Done already: no error.
    async fn stop(&self) -> Result<()>;

    /// Resolves when the machine has ended by itself or by [`Machine::stop`]; says how, for people.
    async fn ended(&self) -> String;

    /// Host memory behind it.
    async fn memory(&self) -> Result<MemoryUse>;

    /// CPU time that its monitor has used. None: this engine does not measure it.
    async fn cpu_time(&self) -> Result<Option<Duration>> {
        Ok(None)
    }

    /// Unix stream socket of the agent port. One connection at a time.
    fn agent_socket(&self) -> PathBuf;

    /// The last bytes the guest wrote to its console, at most `limit`.
    async fn console(&self, limit: usize) -> Vec<u8>;
}

/// A monitor that waits. Dropping it without [`Seat::cancel`] ends the process all the same.
#[async_trait]
pub trait Seat: Send + Sync {
    /// What it owns.
    fn resources(&self) -> &Resources;

    /// Still waiting?
    fn is_alive(&self) -> bool;

    /// Ends the process and removes what the engine put into its resources.
    async fn cancel(self: Box<Self>);

    /// For the engine that made it, which takes it back in [`Frozen::thaw`].
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// A machine at one instant, on this node. Costs no CPU. Dropping it frees nothing on disk: whoever owns the
/// directory removes it; machines thawed from it do not notice.
#[async_trait]
pub trait Frozen: Send + Sync {
    /// Its directory and shape.
    fn image(&self) -> &Image;

    /// Makes a new machine in `seat`. Returns once its vCPUs run. On error the seat is gone.
    async fn thaw(&self, seat: Box<dyn Seat>) -> Result<(Box<dyn Machine>, Steps)>;

    /// Makes the directory a durable, self-contained snapshot: everything flushed, manifest last.
    async fn persist(&self) -> Result<keiki_snapshot::Manifest>;
}
