//! The vocabulary of Keiki: ids, shapes, states, and the bodies of `/v1`.
//!
//! Plain data, shared by the node, the client and the command line. Sizes carry their unit in the
//! name.

pub mod api;
mod id;

pub use id::{IdError, SandboxId, SnapshotId, TemplateName};

use serde::{Deserialize, Serialize};

/// The shape of a machine: fixed when its template is built, and the same for every descendant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Shape {
    pub vcpus: u8,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// Root disk in MiB.
    pub disk_mib: u32,
}

/// Engine that runs machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EngineKind {
    /// QEMU, emulated in software.
    Qemu,
    /// Keiki's own monitor, on KVM.
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

/// Which machines may share memory until they write it, from none to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Each sandbox has its own copy.
    None,
    /// Only within a workspace.
    Workspace,
    /// Sandboxes of one template on the whole node, of one snapshot within its workspace.
    Node,
}

/// State of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Status {
    /// Being created.
    Creating,
    /// Running.
    Running,
    /// In memory, with its vCPUs paused.
    Paused,
    /// Saved to disk and stopped; wakes under the same id.
    Hibernated,
    /// Being deleted.
    Stopping,
    Deleted,
    /// Its machine died, or could not be created; `error` says why.
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

    /// As on the wire and in records.
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

/// How a machine was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Origin {
    /// Created from a template.
    Create,
    /// Forked from a running sandbox.
    Fork,
    /// Restored from a snapshot.
    Restore,
    /// Woken from hibernation.
    Wake,
}

impl Origin {
    /// As on the wire, in records and in the guest.
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
