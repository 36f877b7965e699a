//! File trees as tar streams.
//!
//! [`pack`] writes a file or directory with modes, owners, times, symlinks, hard links, long names
//! and holes. [`unpack`] reads such a stream from any sender and trusts nothing in it:
//!
//! - Every name must stay below the destination: no `..`, no absolute path, and no step through a
//!   symlink.
//! - Devices, pipes and everything else that is not a file, directory or link is refused.
//! - It accepts no more bytes than are free, and no more entries than [`MAX_ENTRIES`].
//! - It unpacks next to the destination first and moves everything into place at the end: a
//!   rejected archive leaves nothing behind.

mod pack;
mod pieces;
mod unpack;

pub use pack::pack;
pub use pieces::{Receiver, Sender};
pub use unpack::{Options, unpack};

use std::{ffi::OsString, io, path::Path};

/// Most entries of one archive.
pub const MAX_ENTRIES: u64 = 1_000_000;

/// What was packed or unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Regular files, including hard links.
    pub files: u64,
    pub dirs: u64,
    pub symlinks: u64,
    /// Size of the files' contents.
    pub bytes: u64,
    /// Devices, sockets and pipes that were left out.
    pub skipped: u64,
}

/// Why packing or unpacking failed. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The archive contains something that is not allowed.
    #[error("the archive is refused: {0}")]
    Refused(String),
    /// It is not an archive, or is incomplete.
    #[error("the archive is damaged or incomplete: {0}")]
    Damaged(String),
    /// It does not fit.
    #[error("the archive needs more than the {free_mib} MiB that are free")]
    NoRoom {
        /// Free space at the start.
        free_mib: u64,
    },
    /// The system refused.
    #[error("{path}")]
    System {
        path: String,
        #[source]
        source: io::Error,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the path to an error.
trait About<T> {
    fn about(self, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> About<T> for std::result::Result<T, E> {
    fn about(self, path: &Path) -> Result<T> {
        self.map_err(|error| Error::System { path: path.display().to_string(), source: error.into() })
    }
}

/// The last part of a path: the name of the top entry of its archive.
#[must_use]
pub fn base_name(path: &Path) -> OsString {
    path.file_name().map_or_else(|| ".".into(), Into::into)
}

#[cfg(test)]
mod tests;
