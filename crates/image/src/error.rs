//! What can go wrong, in sentences for people.

use std::{io, path::PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image was not made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program is not installed.
    #[error("`{tool}` is missing: install the package {package}")]
    ToolMissing {
        /// Program.
        tool: String,
        /// Debian package that has it.
        package: &'static str,
    },
    /// A program failed.
    #[error("`{tool}` failed while {action} ({status})\n{tail}")]
    ToolFailed {
        /// Program.
        tool: String,
        /// What it was to do.
        action: String,
        /// How it ended.
        status: String,
        /// Its last words.
        tail: String,
    },
    /// The package mirror was not reached.
    #[error("no network while {action}: the package mirror was not reached. `{tool}` said:\n{tail}")]
    NoNetwork {
        /// Program.
        tool: String,
        /// What it was to do.
        action: String,
        /// Its last words.
        tail: String,
    },
    /// The disk is full.
    #[error("no space left on the disk of {} while {action}", path.display())]
    NoSpace {
        /// A path on that disk.
        path: PathBuf,
        /// What was being done.
        action: String,
    },
    /// The host's apt knows no Debian mirror.
    #[error(
        "no Debian package mirror found in this host's apt configuration: add the Debian main archive to it, or \
         set KEIKI_DEBIAN_MIRROR"
    )]
    NoMirror,
    /// Root disks are made as root.
    #[error("root disks hold files of several users: building one needs root")]
    NotRoot,
    /// A recipe cannot be followed.
    #[error("template `{name}`: {reason}")]
    BadSpec {
        /// Of the template.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The kernel package is not what it should be.
    #[error("kernel package: {0}")]
    BadKernel(String),
    /// A file operation failed.
    #[error("{action} {}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// Names the file in an I/O error; a full disk becomes [`Error::NoSpace`].
pub(crate) fn io_error(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::NoSpace { path, action: action.to_owned() }
        }
        _ => Error::Io { action, path, source },
    }
}
