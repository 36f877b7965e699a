//! Bodies of `/v1`. Field names are the wire's. Times are RFC 3339 in UTC; durations and sizes say their unit.

pub mod execs;
pub mod secrets;

use crate::{EngineKind, SandboxId, Shape, SnapshotId, Status};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `POST /v1/sandboxes`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CreateSandbox {
    /// Template to start from. Default `base`; ignored with `from_snapshot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Restore this snapshot instead of a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_snapshot: Option<String>,
    /// Wanted vCPUs. Baked into the template: any other number is an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u64>,
    /// Wanted RAM in MiB. Baked into the template: any other number is an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Wanted root disk in MiB. Baked into the template: any other number is an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mb: Option<u64>,
    /// Not supported: anything but an empty list is an error.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schema(value_type = Vec<Object>))]
    pub volumes: Vec<serde_json::Value>,
    /// Free-form labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Seconds without activity until the sandbox is deleted (or hibernated if `persistent`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// Hibernate instead of delete when the TTL runs out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Files of `/run/keiki/secrets` by their names. With `from_snapshot`: further ones, and the values of those whose
    /// fate is `replace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<BTreeMap<String, secrets::Secret>>,
}

/// A sandbox, as every endpoint shows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Sandbox {
    /// Id.
    pub id: SandboxId,
    /// Template that its lineage started from.
    pub template: String,
    /// Version (content digest) of that template.
    pub template_version: String,
    /// vCPUs.
    pub cpu: u8,
    /// RAM in MiB.
    pub memory_mb: u32,
    /// Root disk in MiB.
    pub disk_mb: u32,
    /// State.
    pub status: Status,
    /// Outside address of its network slot, empty without one.
    pub guest_ip: String,
    /// When it was made.
    pub created_at: String,
    /// Labels.
    pub metadata: BTreeMap<String, String>,
    /// Snapshot it was restored from.
    pub from_snapshot: Option<SnapshotId>,
    /// Request to released, in ms.
    pub boot_ms: u64,
    /// `create`, `fork`, `restore` or `wake`.
    pub boot_mode: String,
    /// Hibernates instead of being deleted.
    pub persistent: bool,
    /// Idle seconds it may live.
    pub ttl_seconds: u64,
    /// Seconds since its last activity.
    pub idle_seconds: u64,
    /// Lineage: the running sandbox it was forked from.
    pub parent_sandbox_id: Option<SandboxId>,
    /// Lineage: the snapshot it, or the ancestor it was forked from, came from.
    pub parent_snapshot_id: Option<SnapshotId>,
    /// Number of this individual: unique for ever, greater than its ancestors'.
    pub generation: u64,
    /// What runs it.
    pub engine: EngineKind,
    /// Memory use; only where asked for (`GET` of one sandbox, or `?memory=true` on the list).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub memory: Option<MemoryUse>,
    /// CPU time that its machine has used since this machine began, in ms; where memory use is shown and the engine
    /// measures it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cpu_ms: Option<u64>,
    /// How long the steps that made it took.
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
    /// RAM the guest believes it has.
    pub guest_bytes: u64,
    /// Resident set of the monitor.
    pub rss_bytes: u64,
    /// Proportional set size: shared pages divided by their users.
    pub pss_bytes: u64,
    /// Pages only this sandbox has.
    pub private_bytes: u64,
    /// Pages it shares with relatives or the page cache.
    pub shared_bytes: u64,
}

/// Durations of one operation, in ms.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Timings {
    /// Whole operation at the node.
    pub total_ms: f64,
    /// vCPUs stood still (freezing verbs).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub vcpu_pause_ms: Option<f64>,
    /// User processes stood still (freezing verbs).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user_pause_ms: Option<f64>,
    /// Request to vCPU running, without the release gate (thawing verbs).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub thaw_ms: Option<f64>,
    /// The release gate: connect, new identity, user work thawed (thawing verbs).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub release_ms: Option<f64>,
    /// Every step, in order: name and ms.
    #[serde(default)]
    pub steps: Vec<Step>,
}

/// One step of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Step {
    /// Its name.
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

/// `POST /v1/sandboxes/{id}/fork`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkSandbox {
    /// Children wanted: 1 (default) to 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<i64>,
    /// Labels of the children; default the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// TTL of the children; default the parent's value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// Further secrets of the children, and the values of those whose fate is `replace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<BTreeMap<String, secrets::Secret>>,
}

/// Answer to fork.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Forked {
    /// The sandbox that was forked.
    pub parent_id: SandboxId,
    /// The first child.
    pub sandbox: Sandbox,
    /// All children.
    pub children: Vec<Sandbox>,
    /// Of the one freeze and the whole fork.
    pub timings: Timings,
}

/// `POST /v1/sandboxes/{id}/fork-tree`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkTree {
    /// Children wanted: 1 to 64.
    pub count: i64,
    /// Labels of the children; default the parent's. `fork_tree_id` and `fork_parent_id` are added;
    /// `explore_ttl` (seconds) is their TTL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// TTL of the children; default `metadata.explore_ttl`, else the parent's value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
}

/// Answer to `POST /v1/sandboxes/{id}/fork-tree`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkedTree {
    /// Id of this fan-out, also in the children's `metadata.fork_tree_id`.
    pub tree_id: String,
    /// The sandbox that was forked.
    pub parent_id: SandboxId,
    /// All children.
    pub children: Vec<Sandbox>,
    /// Of the one freeze and the whole fork.
    pub timings: Timings,
}

/// `POST /v1/sandboxes/{id}/promote`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Promote {
    /// Delete the other children of the tree.
    #[serde(default)]
    pub cleanup_siblings: bool,
    /// The tree; default the one in the child's metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_id: Option<String>,
}

/// Answer to promote.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Promoted {
    /// The child that stays.
    pub winner: SandboxId,
    /// The tree.
    pub tree_id: String,
    /// Siblings deleted.
    pub deleted: Vec<SandboxId>,
    /// Siblings that could not be deleted, and why.
    pub failures: BTreeMap<String, String>,
}

/// `POST /v1/sandboxes/{id}/exec` and `/exec/stream`. One of `cmd` (a shell line) and `argv`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecRequest {
    /// A line for `/bin/sh -c`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmd: Option<String>,
    /// Program and arguments, no shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Added to the environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; default the user's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User name or `uid[:gid]`; default root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Standard input, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// Standard input, base64, for bytes that are not text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
    /// Seconds until every process of this exec is killed; default none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
}

/// Answer of the buffered exec.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecResult {
    /// Standard output; bytes that are not UTF-8 are replaced (see `stdout_base64`).
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
    /// As a shell reports it: 128+n for signal n, 127 not found, 126 not executable.
    pub exit_code: i32,
    /// Run time in ms.
    pub duration_ms: u64,
    /// A stream was longer than 16 MiB; the rest was dropped.
    pub truncated: bool,
    /// Exact bytes, only where they were not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// Exact bytes, only where they were not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsEntry {
    /// Name in its directory.
    pub name: String,
    /// Whole path.
    pub path: String,
    /// Is a directory (a symlink to one is not).
    pub is_dir: bool,
    /// Bytes.
    pub size: u64,
    /// Permission bits, octal, four digits: `0644`.
    pub mode: String,
    /// Seconds since the epoch.
    pub mtime: i64,
    /// `file`, `dir`, `symlink`, `fifo`, `socket`, `block`, `char`.
    pub kind: String,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Where a symlink points.
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
    /// Where.
    pub path: String,
    /// How many.
    pub bytes: u64,
}

/// Answer to `PUT /v1/sandboxes/{id}/archive`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsUnpacked {
    /// Where.
    pub path: String,
    /// Regular files.
    pub files: u64,
    /// Directories.
    pub dirs: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Contents of the files.
    pub bytes: u64,
}

/// One event of `GET /v1/sandboxes/{id}/fs/watch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsEvent {
    /// `ready` first; `created`, `modified`, `closed` (after writing), `attributes`, `removed`, `moved`; `overflow`: some
    /// events are missing.
    pub kind: String,
    /// What it is about.
    pub path: String,
    /// moved: the old path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// It is a directory.
    pub is_dir: bool,
}

/// A change to the guest's file tree, `POST /v1/sandboxes/{id}/fs/{mkdir,rename,remove,chmod,symlink}`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FsChange {
    /// What to change (for rename and symlink: the new name).
    pub path: String,
    /// rename: the old name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// symlink: where it points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// chmod, mkdir: permission bits, octal text such as `0755`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// mkdir: also the parents. remove: also what is inside.
    #[serde(default)]
    pub recursive: bool,
}

/// A snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Id.
    pub id: SnapshotId,
    /// The sandbox it was taken of.
    pub sandbox_id: SandboxId,
    /// Template of the lineage.
    pub template: String,
    /// Version of that template.
    pub template_version: String,
    /// Bytes that deleting it could free at most (shared blocks counted).
    pub size_bytes: u64,
    /// When.
    pub created_at: String,
    /// Shape.
    pub shape: Shape,
    /// Lineage.
    pub parent_snapshot_id: Option<SnapshotId>,
    /// Engine that made it and can restore it.
    pub engine: EngineKind,
    /// Labels of the sandbox at that time.
    pub metadata: BTreeMap<String, String>,
    /// Seconds since then.
    #[serde(default)]
    pub age_seconds: u64,
    /// Release of the kernel in it; empty where it was not recorded.
    #[serde(default)]
    pub kernel: String,
    /// Why it should be made anew; empty where nothing speaks for that.
    #[serde(default)]
    pub stale: Vec<Stale>,
    /// Of the freeze; only in the answer that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

/// Why a snapshot should be made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Stale {
    /// Its template has another version by now.
    TemplateRebuilt,
    /// It is older than the node's `snapshot_max_age`.
    Old,
    /// It is older than the node's `snapshot_refuse_age`: restoring it answers 409.
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
    /// New persistence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
}

/// `GET /v1/sandboxes/{id}/lifecycle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Lifecycle {
    /// Idle seconds it may live.
    pub ttl_seconds: u64,
    /// Hibernates instead of being deleted.
    pub persistent: bool,
    /// Seconds since its last activity.
    pub idle_seconds: u64,
}

/// A TCP port that something in a sandbox listens on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Port {
    /// Its number.
    pub port: u16,
    /// Where it listens, inside: `0.0.0.0`, `127.0.0.1`, `::`.
    pub address: String,
    /// Whose it is, where that was found.
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
    /// By number.
    pub items: Vec<Port>,
}

/// `POST /v1/sandboxes/{id}/previews`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CreatePreview {
    /// Port inside, 1 to 65535.
    pub port: u16,
    /// How long the link may be used: 1 to 604800 (a week); default 3600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
}

/// A link to a port of a sandbox, for a browser.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Preview {
    /// The link. Whoever has it may use this port of this sandbox, and nothing else.
    pub url: String,
    /// The port.
    pub port: u16,
    /// Until when; none where the node asks for no keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
}

/// What happened to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EventKind {
    /// It is listed; its machine is being made.
    Created,
    /// It was released to its user, or found running by a node that started.
    Running,
    /// Its vCPUs stand still.
    Paused,
    /// They run again.
    Resumed,
    /// It was taken at one instant, and went on or ended: `ms` is how long its vCPUs stood still.
    Frozen,
    /// `children` branched off.
    Forked,
    /// `snapshot_id` is durable.
    Snapshotted,
    /// Stored and stopped.
    Hibernated,
    /// Back, under its id.
    Woken,
    /// Its TTL ran out; what follows says whether it was deleted or hibernated.
    Expired,
    /// Gone.
    Deleted,
    /// Its machine ended by itself, or it could not be made: `reason`.
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

/// One thing that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Event {
    /// Its number on this node: only grows, not without gaps.
    pub seq: u64,
    /// When.
    pub at: String,
    /// Whose.
    pub sandbox_id: SandboxId,
    /// What.
    pub kind: EventKind,
    /// `failed`: why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long it took, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
    /// `created`: the sandbox it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_sandbox_id: Option<SandboxId>,
    /// `created`: restored from it. `snapshotted`: the new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<SnapshotId>,
    /// `forked`: who.
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
    /// Name.
    pub name: String,
    /// Content digest of what it was baked from; empty while never built.
    pub version: String,
    /// vCPUs.
    pub cpu: u8,
    /// RAM in MiB.
    pub memory_mb: u32,
    /// Root disk in MiB.
    pub disk_mb: u32,
    /// Bytes on disk.
    pub size_bytes: u64,
    /// `ready`, `building`, `missing`.
    pub status: String,
    /// What it holds.
    pub description: String,
    /// When it was baked.
    pub created_at: String,
    /// Cold boot to ready when it was baked, in ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_boot_ms: Option<f64>,
    /// Release of its kernel; empty while never built, or where it was not recorded.
    #[serde(default)]
    pub kernel: String,
}

/// `POST /v1/templates/build`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct BuildTemplate {
    /// Template to build.
    pub name: String,
    /// vCPUs; default the template's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u64>,
    /// RAM in MiB; default the template's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Root disk in MiB; default the template's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_mb: Option<u64>,
    /// Take newer packages, and bake, even if the result would be the same.
    #[serde(default)]
    pub force: bool,
    /// Bake again although nothing has changed, from the packages that are there.
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

/// A running or ended template build.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Build {
    /// Id.
    pub id: String,
    /// Template.
    pub name: String,
    /// `queued`, `running`, `baking`, `done` or `failed`.
    pub status: String,
    /// Why it failed, else empty.
    pub error: String,
    /// When it began.
    pub started_at: String,
    /// When it ended, else empty.
    pub ended_at: String,
    /// What it is doing now, for people.
    pub step: String,
}

/// Every error: one plain sentence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// What was wrong and what would be right.
    pub error: String,
    /// The end of the guest's console, where a machine failed.
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
    /// Of the node.
    pub version: String,
    /// What runs its machines.
    pub engine: String,
}
