//! Secrets: files that a caller passes to a sandbox, and what happens to them in its copies.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What happens to a secret in a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Fate {
    /// The copy keeps it.
    Inherit,
    /// The copy does not get it.
    Drop,
    /// The request that makes the copy must give a new value.
    Replace,
}

/// The fate of a secret in each kind of copy. A woken sandbox is not a copy: it has all its
/// secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fates {
    /// In forks.
    pub on_fork: Fate,
    /// In sandboxes restored from a snapshot. Unless `inherit`, it is wiped before the snapshot is
    /// taken.
    pub on_restore: Fate,
}

/// A secret. Its value is write-only.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Secret {
    /// Text, at most 64 KiB.
    pub value: String,
    /// Owner of the file in the sandbox: a name, `uid` or `uid:gid`; root by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Fate in forks; `inherit` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_fork: Option<Fate>,
    /// Fate in sandboxes restored from a snapshot; `drop` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_restore: Option<Fate>,
}

impl Secret {
    /// Fates, with defaults filled in.
    #[must_use]
    pub fn fates(&self) -> Fates {
        Fates {
            on_fork: self.on_fork.unwrap_or(Fate::Inherit),
            on_restore: self.on_restore.unwrap_or(Fate::Drop),
        }
    }
}

/// Leaves the value out: requests are logged.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret")
            .field("owner", &self.owner)
            .field("fates", &self.fates())
            .finish_non_exhaustive()
    }
}
