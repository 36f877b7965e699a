//! Bodies of `/v1`. Times are RFC 3339 in UTC; durations and sizes carry their unit in the name.

pub mod execs;
pub mod secrets;

use crate::{EngineKind, SandboxId, Shape, SnapshotId, Status};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `POST /v1/sandboxes`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CreateSandbox {
    /// Template to start from; `base` by default. Ignored with `from_snapshot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Snapshot to start from, instead of a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_snapshot: Option<String>,
    /// vCPUs. Must match the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u64>,
    /// RAM in MiB. Must match the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Root disk in MiB. Must match the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mb: Option<u64>,
    /// Not supported yet: must be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<Object>))]
    pub volumes: Vec<serde_json::Value>,
    /// Free-form labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Seconds without activity after which the sandbox is deleted, or hibernated if `persistent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// Hibernate the sandbox instead of deleting it when the TTL expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Files in `/run/keiki/secrets`, by name. With `from_snapshot`, adds to the snapshot's secrets
    /// and gives new values to those whose `on_restore` is `replace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<BTreeMap<String, secrets::Secret>>,
}

/// A sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Sandbox {
    pub id: SandboxId,
    /// Template its lineage started from.
    pub template: String,
    /// Version of that template: a digest of its contents.
    pub template_version: String,
    pub cpu: u8,
    /// RAM in MiB.
    pub memory_mb: u32,
    /// Root disk in MiB.
    pub disk_mb: u32,
    pub status: Status,
    /// Outside address of its network slot; empty if it has none.
    pub guest_ip: String,
    pub created_at: String,
    pub metadata: BTreeMap<String, String>,
    /// Snapshot it was restored from.
    pub from_snapshot: Option<SnapshotId>,
    /// From the request to the release of the sandbox, in ms.
    pub boot_ms: u64,
    /// `create`, `fork`, `restore` or `wake`.
    pub boot_mode: String,
    /// Hibernates, instead of being deleted, when the TTL expires.
    pub persistent: bool,
    /// Seconds it may be idle.
    pub ttl_seconds: u64,
    /// Seconds since its last activity.
    pub idle_seconds: u64,
    /// Sandbox it was forked from.
    pub parent_sandbox_id: Option<SandboxId>,
    /// Snapshot that it, or the ancestor it was forked from, came from.
    pub parent_snapshot_id: Option<SnapshotId>,
    /// Unique number of this copy, greater than that of any ancestor.
    pub generation: u64,
    pub engine: EngineKind,
    /// Memory use: in `GET` of one sandbox, and in the list with `?memory=true`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub memory: Option<MemoryUse>,
    /// CPU time its machine has used since it was started, in ms. Shown with memory use, if the
    /// engine measures it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cpu_ms: Option<u64>,
    /// How long it took to create.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub timings: Option<Timings>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
}

/// Host memory behind a sandbox, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MemoryUse {
    /// RAM of the guest.
    pub guest_bytes: u64,
    /// Resident set of the monitor.
    pub rss_bytes: u64,
    /// Proportional set size: shared pages are divided among their users.
    pub pss_bytes: u64,
    /// Pages of this sandbox alone.
    pub private_bytes: u64,
    /// Pages shared with other sandboxes or the page cache.
    pub shared_bytes: u64,
}

/// Durations of one operation, in ms.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Timings {
    /// The whole operation on the node.
    pub total_ms: f64,
    /// Pause of the vCPUs, if the operation froze the machine.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub vcpu_pause_ms: Option<f64>,
    /// Pause of user processes, if the operation froze the machine.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user_pause_ms: Option<f64>,
    /// From the request to running vCPUs, if the operation thawed a machine.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub thaw_ms: Option<f64>,
    /// The release gate, if the operation thawed a machine: the guest connects, assumes a new
    /// identity, and resumes user processes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub release_ms: Option<f64>,
    /// All steps, in order.
    #[serde(default)]
    pub steps: Vec<Step>,
}

/// One step of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Step {
    pub name: String,
    /// How long it took, in ms.
    pub ms: f64,
}

/// `GET /v1/sandboxes`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SandboxList {
    /// Newest first.
    pub items: Vec<Sandbox>,
}

/// Most children of one fork.
pub const MAX_FORK: i64 = 64;

/// `POST /v1/sandboxes/{id}/fork`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkSandbox {
    /// Number of children, 1 to 64; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<i64>,
    /// Labels of the children; the parent's by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// TTL of the children; the parent's by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// Adds to the parent's secrets, and gives new values to those whose `on_fork` is `replace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<BTreeMap<String, secrets::Secret>>,
}

/// Answer to `POST /v1/sandboxes/{id}/fork`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Forked {
    /// Sandbox that was forked.
    pub parent_id: SandboxId,
    /// The first child.
    pub sandbox: Sandbox,
    /// All children.
    pub children: Vec<Sandbox>,
    /// Times of the freeze and of the whole fork.
    pub timings: Timings,
}

/// `POST /v1/sandboxes/{id}/fork-tree`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkTree {
    /// Number of children, 1 to 64.
    pub count: i64,
    /// Labels of the children; the parent's by default. `fork_tree_id` and `fork_parent_id` are
    /// added. `explore_ttl` sets the TTL, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// TTL of the children; by default `metadata.explore_ttl`, else the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
}

/// Answer to `POST /v1/sandboxes/{id}/fork-tree`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkedTree {
    /// Id of the tree, also in the children's `metadata.fork_tree_id`.
    pub tree_id: String,
    /// Sandbox that was forked.
    pub parent_id: SandboxId,
    /// All children.
    pub children: Vec<Sandbox>,
    /// Times of the freeze and of the whole fork.
    pub timings: Timings,
}

/// `POST /v1/sandboxes/{id}/promote`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Promote {
    /// Delete the other children of the tree.
    #[serde(default)]
    pub cleanup_siblings: bool,
    /// Id of the tree; by default the one in the child's metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_id: Option<String>,
}

/// Answer to `POST /v1/sandboxes/{id}/promote`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Promoted {
    /// Child that was promoted.
    pub winner: SandboxId,
    pub tree_id: String,
    /// Siblings that were deleted.
    pub deleted: Vec<SandboxId>,
    /// Siblings that could not be deleted, and why.
    pub failures: BTreeMap<String, String>,
}

/// `POST /v1/sandboxes/{id}/exec` and `/exec/stream`. Give either `cmd` or `argv`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecRequest {
    /// Command line for `/bin/sh -c`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmd: Option<String>,
    /// Program and arguments, without a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Variables to add to the environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the user's home by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User name or `uid[:gid]`; root by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Standard input, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// Standard input in base64, for bytes that are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
    /// Seconds after which all processes of the command are killed; no limit by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
}

/// Answer to `POST /v1/sandboxes/{id}/exec`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecResult {
    /// Standard output, with U+FFFD for bytes that are not UTF-8 (see `stdout_base64`).
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
    /// As a shell reports it: 128+n for signal n, 127 not found, 126 not executable.
    pub exit_code: i32,
    /// Run time in ms.
    pub duration_ms: u64,
    /// A stream was longer than 16 MiB, and the rest was dropped.
    pub truncated: bool,
    /// The exact bytes, if they are not all UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// The exact bytes, if they are not all UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
}

/// A file, directory or other entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsEntry {
    pub name: String,
    /// Absolute path.
    pub path: String,
    /// Is a directory. False for a symlink to one.
    pub is_dir: bool,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits as four octal digits, e.g. `0644`.
    pub mode: String,
    /// Modification time, in seconds since the epoch.
    pub mtime: i64,
    /// `file`, `dir`, `symlink`, `fifo`, `socket`, `block` or `char`.
    pub kind: String,
    pub uid: u32,
    pub gid: u32,
    /// Target of a symlink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// `GET /v1/sandboxes/{id}/fs/dir`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsList {
    /// Sorted by name.
    pub entries: Vec<FsEntry>,
}

/// Answer to `PUT /v1/sandboxes/{id}/fs`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsWritten {
    pub path: String,
    /// Bytes written.
    pub bytes: u64,
}

/// Answer to `PUT /v1/sandboxes/{id}/archive`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsUnpacked {
    pub path: String,
    /// Regular files.
    pub files: u64,
    pub dirs: u64,
    pub symlinks: u64,
    /// Size of the files' contents.
    pub bytes: u64,
}

/// One event of `GET /v1/sandboxes/{id}/fs/watch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsEvent {
    /// `ready` comes first, then `created`, `modified`, `closed` (after writing), `attributes`,
    /// `removed` or `moved`. `overflow` means that events were lost.
    pub kind: String,
    pub path: String,
    /// Old path, if `moved`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    pub is_dir: bool,
}

/// `POST /v1/sandboxes/{id}/fs/{mkdir,rename,remove,chmod,symlink}`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsChange {
    /// Path to change; for rename and symlink, the new path.
    pub path: String,
    /// For rename: the old path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// For symlink: the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// For chmod and mkdir: permission bits in octal, e.g. `0755`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// For mkdir: create missing parents. For remove: remove the contents too.
    #[serde(default)]
    pub recursive: bool,
}

/// A snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Snapshot {
    pub id: SnapshotId,
    /// Sandbox it was taken from.
    pub sandbox_id: SandboxId,
    /// Template its lineage started from.
    pub template: String,
    /// Version of that template.
    pub template_version: String,
    /// Most that deleting it can free, in bytes: includes blocks shared with others.
    pub size_bytes: u64,
    pub created_at: String,
    pub shape: Shape,
    /// Snapshot its sandbox came from.
    pub parent_snapshot_id: Option<SnapshotId>,
    /// Engine that took it, and that can restore it.
    pub engine: EngineKind,
    /// Labels the sandbox had.
    pub metadata: BTreeMap<String, String>,
    /// Seconds since it was taken.
    #[serde(default)]
    pub age_seconds: u64,
    /// Kernel release in it; empty if unknown.
    #[serde(default)]
    pub kernel: String,
    /// Reasons to take it again; empty if there are none.
    #[serde(default)]
    pub stale: Vec<Stale>,
    /// Times of the freeze: only in the answer to the request that took it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

/// Reason to take a snapshot again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Stale {
    /// Its template has changed since.
    TemplateRebuilt,
    /// Older than the node's `snapshot_max_age`.
    Old,
    /// Older than the node's `snapshot_refuse_age`: restoring it fails with 409.
    Refused,
}

impl std::fmt::Display for Stale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::TemplateRebuilt => "template rebuilt",
            Self::Old => "old",
            Self::Refused => "too old to restore",
        })
    }
}

/// `GET /v1/snapshots`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SnapshotList {
    /// Newest first.
    pub snapshots: Vec<Snapshot>,
}

/// `PATCH /v1/sandboxes/{id}/lifecycle`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SetLifecycle {
    /// New TTL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// Hibernate the sandbox instead of deleting it when the TTL expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
}

/// `GET /v1/sandboxes/{id}/lifecycle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Lifecycle {
    /// Seconds it may be idle.
    pub ttl_seconds: u64,
    /// Hibernates, instead of being deleted, when the TTL expires.
    pub persistent: bool,
    /// Seconds since its last activity.
    pub idle_seconds: u64,
}

/// A listening TCP port in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Port {
    pub port: u16,
    /// Address it listens on in the sandbox, e.g. `0.0.0.0`, `127.0.0.1` or `::`.
    pub address: String,
    /// Process that listens, if found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Name of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
}

/// `GET /v1/sandboxes/{id}/ports`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PortList {
    /// Sorted by port.
    pub items: Vec<Port>,
}

/// `POST /v1/sandboxes/{id}/previews`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CreatePreview {
    /// Port in the sandbox, 1 to 65535.
    pub port: u16,
    /// Seconds the link is valid, 1 to 604800 (a week); 3600 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
}

/// A browser link to a port in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Preview {
    /// The link. It gives access to this port of this sandbox, and nothing else.
    pub url: String,
    pub port: u16,
    /// End of validity; none if the node requires no API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
}

/// What happened to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EventKind {
    /// The sandbox is listed, and its machine is being created.
    Created,
    /// The sandbox was released to its user, or found running when the node started.
    Running,
    /// Its vCPUs were paused.
    Paused,
    /// Its vCPUs were resumed.
    Resumed,
    /// It was frozen for a fork, snapshot or hibernation; `ms` is how long its vCPUs were paused.
    Frozen,
    /// `children` were forked from it.
    Forked,
    /// `snapshot_id` is durable.
    Snapshotted,
    /// It was saved to disk and stopped.
    Hibernated,
    /// It was woken, under the same id.
    Woken,
    /// Its TTL expired; the next event is `deleted` or `hibernated`.
    Expired,
    /// It was deleted.
    Deleted,
    /// Its machine died, or could not be created; see `reason`.
    Failed,
}

impl EventKind {
    /// The word used on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Resumed => "resumed",
            Self::Frozen => "frozen",
            Self::Forked => "forked",
            Self::Snapshotted => "snapshotted",
            Self::Hibernated => "hibernated",
            Self::Woken => "woken",
            Self::Expired => "expired",
            Self::Deleted => "deleted",
            Self::Failed => "failed",
        }
    }
}

/// An event in the life of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Event {
    /// Number on this node: increasing, with gaps.
    pub seq: u64,
    pub at: String,
    pub sandbox_id: SandboxId,
    pub kind: EventKind,
    /// For `failed`: why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long it took, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
    /// For `created`: the sandbox it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_sandbox_id: Option<SandboxId>,
    /// For `created`: the snapshot it was restored from. For `snapshotted`: the new snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<SnapshotId>,
    /// For `forked`: the children.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<SandboxId>,
}

/// `GET /v1/sandboxes/{id}/events`, `GET /v1/events`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct EventList {
    /// Oldest first.
    pub items: Vec<Event>,
}

/// A template.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Template {
    pub name: String,
    /// Digest of what it was built from; empty until it is built.
    pub version: String,
    pub cpu: u8,
    /// RAM in MiB.
    pub memory_mb: u32,
    /// Root disk in MiB.
    pub disk_mb: u32,
    /// Size on disk, in bytes.
    pub size_bytes: u64,
    /// `ready`, `building` or `missing`.
    pub status: String,
    pub description: String,
    /// When it was built.
    pub created_at: String,
    /// How long its cold boot took when it was built, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_boot_ms: Option<f64>,
    /// Kernel release; empty until it is built, or if unknown.
    #[serde(default)]
    pub kernel: String,
}

/// `POST /v1/templates/build`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BuildTemplate {
    pub name: String,
    /// vCPUs; the template's own by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u64>,
    /// RAM in MiB; the template's own by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Root disk in MiB; the template's own by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_mb: Option<u64>,
    /// Fetch the latest packages and rebuild, even if nothing changed.
    #[serde(default)]
    pub force: bool,
    /// Rebuild from the packages already downloaded, even if nothing changed.
    #[serde(default)]
    pub rebake: bool,
}

/// `GET /v1/templates`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TemplateList {
    /// Sorted by name.
    pub items: Vec<Template>,
}

/// `GET /v1/templates/builds`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BuildList {
    /// Newest first.
    pub items: Vec<Build>,
}

/// A build of a template, running or finished.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Build {
    pub id: String,
    /// Name of the template.
    pub name: String,
    /// `queued`, `running`, `baking`, `done` or `failed`.
    pub status: String,
    /// Why it failed; empty unless it did.
    pub error: String,
    /// When it started.
    pub started_at: String,
    /// When it ended; empty until then.
    pub ended_at: String,
    /// What it is doing, in words.
    pub step: String,
}

/// Body of every error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// What is wrong, in one sentence.
    pub error: String,
    /// Last lines of the guest's console, if a machine failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console: Option<String>,
}

/// `GET /healthz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Health {
    /// `ok`.
    pub status: String,
}

/// `GET /v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Version {
    /// Version of the node.
    pub version: String,
    /// Engine that runs its machines.
    pub engine: String,
}
