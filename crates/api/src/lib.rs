//! What the HTTP layer asks of a node.
//!
//! ```text
//!   keiki-http ──> keiki-api <── keiki-node
//! ```
//!
//! The HTTP layer holds an `Arc<dyn Api>` and sees nothing else of the node; the node knows nothing
//! about HTTP. [`Api`] is the sum of small traits, one for each part of a node, so that each part
//! implements its own.

mod error;
mod exec;
mod files;
mod once;
mod preview;
pub mod request;

pub use error::{Error, Result};
pub use exec::{Control, ExecEvent, ReadFrom, Session};
pub use files::{Dialed, Duplex, Reading, Unpacking};
pub use once::{Once, Secret};
pub use preview::{Previews, Target};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use keiki_types::{
    SandboxId, SnapshotId, TemplateName,
    api::{
        Build, BuildTemplate, CreateSandbox, Event, ExecRequest, ForkSandbox, Forked, FsChange, FsEntry,
        FsEvent, FsUnpacked, Lifecycle, Port, Promote, Promoted, Sandbox, SetLifecycle, Snapshot, Template,
        Version,
        execs::{Exec, Signal, StartExec},
    },
};
use std::collections::BTreeMap;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// Most events in one answer.
pub const MAX_EVENTS: usize = 1000;

/// Upper bounds of the histograms in `/metrics`, in seconds: from a step that is nearly nothing to a cold boot.
pub const HISTOGRAM_BOUNDS: [f64; 15] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];

/// A body of bytes as it arrives.
pub type ByteStream = BoxStream<'static, Result<Bytes>>;

/// Every verb of `/v1`.
pub trait Api: Host + Sandboxes + Templates + Commands + Files + Trees + Ports {}

impl<T: Host + Sandboxes + Templates + Commands + Files + Trees + Ports> Api for T {}

/// The node itself.
#[async_trait]
pub trait Host: Send + Sync {
    /// The version of the node and of its engine.
    fn version(&self) -> Version;

    /// Checks an API key; `None` if the caller sent none.
    fn authorize(&self, key: Option<&str>) -> Result<()>;

    /// Names and passes of previews.
    fn previews(&self) -> &Previews;

    /// The secret of [`Once`].
    fn request_key(&self) -> Secret;

    /// The node's metrics as OpenMetrics text, without the final `# EOF`.
    async fn metrics(&self) -> Result<String>;

    /// Events after number `since`, oldest first; without it, the last ones. Of one sandbox, even a deleted one, or of
    /// all.
    async fn events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
        limit: Option<usize>,
    ) -> Result<Vec<Event>>;

    /// Events after number `since`, then new ones. Those of one sandbox end with its deletion.
    async fn follow_events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
    ) -> Result<BoxStream<'static, Event>>;
}

/// Sandboxes and their snapshots.
#[async_trait]
pub trait Sandboxes: Send + Sync {
    /// Creates a sandbox from a template or a snapshot.
    async fn create(&self, request: CreateSandbox, once: Option<Once>) -> Result<Sandbox>;

    /// All sandboxes, newest first. `memory`: measure their memory, too.
    async fn list(&self, memory: bool) -> Result<Vec<Sandbox>>;

    /// One sandbox, with its memory use.
    async fn get(&self, id: SandboxId) -> Result<Sandbox>;

    /// Deletes a sandbox.
    async fn delete(&self, id: SandboxId) -> Result<()>;

    /// Forks a running sandbox, all children or none. `labels` are added to the request's or the parent's.
    async fn fork(
        &self,
        id: SandboxId,
        request: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<Once>,
    ) -> Result<Forked>;

    /// Keeps one child of a fork tree.
    async fn promote(&self, id: SandboxId, request: Promote) -> Result<Promoted>;

    /// Stops the vCPUs.
    async fn pause(&self, id: SandboxId) -> Result<Sandbox>;

    /// Lets a paused sandbox run.
    async fn resume(&self, id: SandboxId) -> Result<Sandbox>;

    /// Stores a sandbox and frees its memory and network; the id stays.
    async fn hibernate(&self, id: SandboxId) -> Result<Sandbox>;

    /// Brings a hibernated sandbox back.
    async fn wake(&self, id: SandboxId) -> Result<Sandbox>;

    /// TTL and idle time. This is not activity.
    async fn lifecycle(&self, id: SandboxId) -> Result<Lifecycle>;

    /// Changes TTL or persistence, and restarts the idle clock.
    async fn set_lifecycle(&self, id: SandboxId, request: SetLifecycle) -> Result<Lifecycle>;

    /// The last `limit` bytes of the guest's console; after its machine failed, what it printed last.
    async fn console(&self, id: SandboxId, limit: usize) -> Result<Bytes>;

    /// Takes a snapshot of a sandbox, which keeps running.
    async fn snapshot(&self, id: SandboxId, once: Option<Once>) -> Result<Snapshot>;

    /// Snapshots of one sandbox or of all, newest first.
    async fn snapshots(&self, of: Option<SandboxId>) -> Result<Vec<Snapshot>>;

    /// One snapshot.
    async fn get_snapshot(&self, id: SnapshotId) -> Result<Snapshot>;

    /// Deletes a snapshot. Sandboxes restored from it stay.
    async fn delete_snapshot(&self, id: SnapshotId) -> Result<()>;
}

/// Templates and their builds.
#[async_trait]
pub trait Templates: Send + Sync {
    /// All templates, built or not.
    async fn templates(&self) -> Result<Vec<Template>>;

    /// One template.
    async fn get_template(&self, name: &TemplateName) -> Result<Template>;

    /// Deletes a built template. Sandboxes and snapshots made from it stay.
    async fn delete_template(&self, name: &TemplateName) -> Result<()>;

    /// Starts a build, or returns the one that is running for this template.
    async fn build_template(&self, request: BuildTemplate) -> Result<Build>;

    /// Builds since the node started, newest first.
    async fn builds(&self) -> Result<Vec<Build>>;

    /// One build.
    async fn get_build(&self, id: &str) -> Result<Build>;

    /// The lines of a build's log, from its start to its end.
    async fn build_log(&self, id: &str) -> Result<BoxStream<'static, String>>;
}

/// Commands in a sandbox. Each call wakes a hibernated one.
#[async_trait]
pub trait Commands: Send + Sync {
    /// Starts a command that ends with its caller. `pty`: columns and rows.
    async fn exec(&self, id: SandboxId, request: ExecRequest, pty: Option<(u32, u32)>) -> Result<Session>;

    /// Starts a command that outlives its caller.
    async fn start_exec(&self, id: SandboxId, request: StartExec) -> Result<Exec>;

    /// All commands the guest knows, oldest first.
    async fn execs(&self, id: SandboxId) -> Result<Vec<Exec>>;

    /// One command.
    async fn get_exec(&self, id: SandboxId, exec: &str) -> Result<Exec>;

    /// Reads a command. The previous reader is notified and disconnected, unless it is the caller
    /// that the command ends with. Dropping the events leaves the command as it is.
    async fn attach_exec(&self, id: SandboxId, exec: &str, from: ReadFrom) -> Result<Session>;

    /// Sends a signal to every process of a command.
    async fn signal_exec(&self, id: SandboxId, exec: &str, signal: Signal) -> Result<()>;

    /// Writes to a command's standard input; `eof` ends it. Returns the number of bytes written.
    async fn write_exec(&self, id: SandboxId, exec: &str, data: ByteStream, eof: bool) -> Result<u64>;

    /// Kills what still runs of a command and forgets it.
    async fn remove_exec(&self, id: SandboxId, exec: &str) -> Result<()>;
}

/// Files in a sandbox. Each call wakes a hibernated one.
#[async_trait]
pub trait Files: Send + Sync {
    /// Opens a file for reading.
    async fn read_file(&self, id: SandboxId, path: &str) -> Result<Reading>;

    /// Writes a file and makes missing parents; the old file stays until the new one is complete.
    async fn write_file(&self, id: SandboxId, path: &str, mode: Option<u32>, data: ByteStream)
    -> Result<u64>;

    /// The entries of a directory, sorted by name.
    async fn list_dir(&self, id: SandboxId, path: &str) -> Result<Vec<FsEntry>>;

    /// One entry; a symlink is not followed.
    async fn stat(&self, id: SandboxId, path: &str) -> Result<FsEntry>;

    /// Makes a directory.
    async fn mkdir(&self, id: SandboxId, change: FsChange) -> Result<()>;

    /// Renames `from` to `path`.
    async fn rename(&self, id: SandboxId, change: FsChange) -> Result<()>;

    /// Removes a file or directory.
    async fn remove(&self, id: SandboxId, change: FsChange) -> Result<()>;

    /// Sets permission bits.
    async fn chmod(&self, id: SandboxId, change: FsChange) -> Result<()>;

    /// Makes a symlink at `path` that points to `target`.
    async fn symlink(&self, id: SandboxId, change: FsChange) -> Result<()>;
}

/// Whole file trees in a sandbox. Each call wakes a hibernated one.
#[async_trait]
pub trait Trees: Send + Sync {
    /// A file or directory as a tar stream, with its last name on top.
    async fn pack(&self, id: SandboxId, path: &str) -> Result<ByteStream>;

    /// Unpacks a tar stream into a directory.
    async fn unpack(&self, id: SandboxId, path: &str, how: Unpacking, data: ByteStream)
    -> Result<FsUnpacked>;

    /// Changes at or below a path from now on.
    async fn watch(
        &self,
        id: SandboxId,
        path: &str,
        recursive: bool,
    ) -> Result<BoxStream<'static, Result<FsEvent>>>;
}

/// TCP ports in a sandbox. Each call wakes a hibernated one.
#[async_trait]
pub trait Ports: Send + Sync {
    /// TCP ports that have a listener, by number.
    async fn ports(&self, id: SandboxId) -> Result<Vec<Port>>;

    /// Connects to a TCP port of a guest, on any of its addresses.
    async fn dial(&self, id: SandboxId, port: u16) -> Result<Dialed>;
}

/// RFC 3339 in UTC, to the millisecond.
pub fn rfc3339(at: OffsetDateTime) -> String {
    let at = at.replace_nanosecond(at.nanosecond() / 1_000_000 * 1_000_000).unwrap_or(at);
    at.format(&Rfc3339).unwrap_or_default()
}
