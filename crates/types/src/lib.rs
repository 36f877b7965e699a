//! The words of Keiki as types: ids, shapes, states, and the bodies of `/v1`.
//!
//! Nothing here does anything. The node, the client and the command line share these, so that a field has
//! one name and one meaning. Sizes say their unit in their name.

pub mod api;
mod id;

pub use id::{IdError, SandboxId, SnapshotId, TemplateName};

use serde::{Deserialize, Serialize};

/// The shape of a machine: fixed when a template is baked, the same for every descendant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Shape {
    /// Virtual CPUs.
    pub vcpus: u8,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// Size of the root disk in MiB.
    pub disk_mib: u32,
}

/// What runs a machine on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EngineKind {
    /// System QEMU, software emulation.
    Qemu,
    /// Our own monitor on KVM.
    Kvm,
}

impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Qemu => "qemu",
            Self::Kvm => "kvm",
        })
    }
}

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Status {
    /// Being made; not yet released to its user.
    Creating,
    /// Its machine runs and serves.
    Running,
    /// Its machine is in memory, its vCPUs stand still.
    Paused,
    /// Stopped; its snapshot wakes it under the same id.
    Hibernated,
    /// Being ended.
    Stopping,
    /// Gone.
    Deleted,
    /// Its machine died or could not be released; the reason is recorded.
    Failed,
}

impl Status {
    /// All states, in the order of a life.
    pub const ALL: [Self; 7] = [
        Self::Creating,
        Self::Running,
        Self::Paused,
        Self::Hibernated,
        Self::Stopping,
        Self::Deleted,
        Self::Failed,
    ];

    /// The word used on the wire and in records.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Hibernated => "hibernated",
            Self::Stopping => "stopping",
            Self::Deleted => "deleted",
            Self::Failed => "failed",
        }
    }

    /// Reads what [`Status::as_str`] wrote.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == word)
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How a machine came to be: told to the guest, recorded, and shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Origin {
    /// Restored from its template's baked snapshot.
    Create,
    /// Branched off a running sandbox.
    Fork,
    /// Restored from a user's snapshot.
    Restore,
    /// The same sandbox after hibernation.
    Wake,
}

impl Origin {
    /// The word used on the wire, in records and in the guest.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Fork => "fork",
            Self::Restore => "restore",
            Self::Wake => "wake",
        }
    }
}
