//! Errors of the engines.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Result of an engine.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Why an operation of an engine failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file or process of the host.
    #[error("{what}")]
    Io {
        /// What was tried, e.g. "cannot create /x/y".
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// The disk is full.
    #[error("no space left on the store while writing {0}")]
    NoSpace(PathBuf),
    /// A snapshot cannot be used here: damaged, or made for another engine, version or machine.
    #[error("snapshot {dir} cannot be used: {why}")]
    Refused {
        /// Which.
        dir: PathBuf,
        /// One clause.
        why: String,
    },
    /// The monitor ended, did not answer in time, or answered with an error.
    #[error("the monitor {0}")]
    Monitor(String),
    /// The machine has ended.
    #[error("the machine has ended: {0}")]
    Ended(String),
}

impl EngineError {
    /// For `map_err`: a failed call on a file; a full disk is a separate error.
    pub(crate) fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace(path),
            _ => Self::Io { what: format!("cannot {what} {}", path.display()), source },
        }
    }
}
