//! File trees as tar streams.
//!
//! [`pack`] writes a file or directory: modes, owners, times, symlinks, hard links, long names, holes. [`unpack`] takes
//! such a stream from whoever sent it. It trusts nothing in it:
//!
//! - Every name must stay below the destination: no `..`, no root, and no step through a symlink, whoever made that.
//! - Devices, pipes and whatever else is neither file, directory nor link are refused.
//! - It takes no more bytes than are free, and no more entries than [`MAX_ENTRIES`].
//! - All is unpacked beside its place first and moved there when the end has come: a refusal leaves nothing.

mod pack;
mod unpack;

pub use pack::pack;
pub use unpack::{Options, unpack};

use std::{ffi::OsString, io, path::Path};

/// Most entries of one archive.
pub const MAX_ENTRIES: u64 = 1_000_000;

/// What was packed or unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Regular files, hard links to one counted too.
    pub files: u64,
    /// Directories.
    pub dirs: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Contents of the files.
    pub bytes: u64,
    /// Devices, sockets and pipes that were left out.
    pub skipped: u64,
}

/// Why it was given up. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What the archive holds is not taken.
    #[error("the archive is refused: {0}")]
    Refused(String),
    /// It is no archive, or not whole.
    #[error("the archive is damaged or not whole: {0}")]
    Damaged(String),
    /// It does not fit.
    #[error("the archive holds more than the {free_mib} MiB that are free")]
    NoRoom {
        /// What was free when it began.
        free_mib: u64,
    },
    /// The system refused.
    #[error("{path}")]
    System {
        /// What it was about.
        path: String,
        /// Why.
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

/// The last part of a path, as the top of its archive is named.
#[must_use]
pub fn base_name(path: &Path) -> OsString {
    path.file_name().map_or_else(|| ".".into(), Into::into)
}

#[cfg(test)]
mod tests;
