//! Secrets: files that a caller gives to one sandbox, and what becomes of them in its copies.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What becomes of a secret in a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Fate {
    /// The copy has it too.
    Inherit,
    /// The copy does not have it.
    Drop,
    /// Whoever makes the copy must give another value.
    Replace,
}

/// Which fate it has in which copies. A hibernated sandbox is no copy: it wakes with all its secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fates {
    /// In forks.
    pub on_fork: Fate,
    /// In what is restored from a snapshot. Unless `inherit`, its bytes are wiped before the snapshot is taken.
    pub on_restore: Fate,
}

/// A secret as it is given. The value is never shown again.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Secret {
    /// Text, at most 64 KiB.
    pub value: String,
    /// Who may read the file: a user of the sandbox, by name, `uid` or `uid:gid`. Default root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// In forks. Default `inherit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_fork: Option<Fate>,
    /// In what is restored from a snapshot. Default `drop`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_restore: Option<Fate>,
}

impl Secret {
    /// Its fates, with their defaults.
    #[must_use]
    pub fn fates(&self) -> Fates {
        Fates {
            on_fork: self.on_fork.unwrap_or(Fate::Inherit),
            on_restore: self.on_restore.unwrap_or(Fate::Drop),
        }
    }
}

/// Without the value: requests are logged.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret")
            .field("owner", &self.owner)
            .field("fates", &self.fates())
            .finish_non_exhaustive()
    }
}
