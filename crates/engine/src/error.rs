//! What can go wrong in a machine room.

use std::{io, path::PathBuf};

/// Result of an engine.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Why an engine could not do it.
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
