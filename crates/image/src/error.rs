//! Errors of this crate, as sentences for people.

use std::{io, path::PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program is not installed.
    #[error("`{tool}` is missing: install the package {package}")]
    ToolMissing {
        tool: String,
        /// The Debian package that contains it.
        package: &'static str,
    },
    /// A program failed.
    #[error("`{tool}` failed while {action} ({status})\n{tail}")]
    ToolFailed {
        tool: String,
        action: String,
        status: String,
        /// The last lines of its output.
        tail: String,
    },
    /// The package mirror cannot be reached.
    #[error("no network while {action}: the package mirror cannot be reached. Output of `{tool}`:\n{tail}")]
    NoNetwork {
        tool: String,
        action: String,
        /// The last lines of its output.
        tail: String,
    },
    /// The disk is full.
    #[error("no space left on the disk of {} while {action}", path.display())]
    NoSpace { path: PathBuf, action: String },
    /// The host's apt has no Debian mirror.
    #[error(
        "no Debian package mirror found in this host's apt configuration: add the Debian main archive to it, or \
         set KEIKI_DEBIAN_MIRROR"
    )]
    NoMirror,
    /// Root disks can only be built as root.
    #[error("building a root disk needs root, because it contains files of several users")]
    NotRoot,
    /// A recipe is not valid.
    #[error("template `{name}`: {reason}")]
    BadSpec { name: String, reason: String },
    /// The kernel package is not as expected.
    #[error("kernel package: {0}")]
    BadKernel(String),
    /// A file operation failed.
    #[error("{action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
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
