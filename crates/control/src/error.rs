//! What can go wrong between a node and a monitor.

use crate::{FailureKind, Role, VERSION};
use std::io;

/// Result of this crate.
pub type Result<T, E = ControlError> = std::result::Result<T, E>;

/// Why a message did not come through, or what the other side said instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The socket.
    #[error("the control socket cannot be used")]
    Io(#[from] io::Error),
    /// The other side closed it.
    #[error("the control socket was closed")]
    Closed,
    /// No answer in time.
    #[error("no answer came on the control socket in time")]
    TimedOut,
    /// The other side speaks another version.
    #[error("the other side of the control socket speaks version {theirs}, this program version {}", VERSION)]
    Version {
        /// Its version.
        theirs: u32,
    },
    /// A packet that is none of ours. One clause.
    #[error("a message on the control socket is malformed: {0}")]
    Malformed(String),
    /// A request came without a descriptor that it needs.
    #[error("{request} needs a descriptor for {role}, and has none")]
    Missing {
        /// Which request.
        request: &'static str,
        /// Which role.
        role: Role,
    },
    /// A request came with a descriptor that it does not take, or too many of a kind.
    #[error("{request} takes at most {most} descriptors for {role}, and has {count}")]
    TooMany {
        /// Which request.
        request: &'static str,
        /// Which role.
        role: Role,
        /// How many it may have.
        most: usize,
        /// How many it has.
        count: usize,
    },
    /// The monitor refused or failed, and nothing changed.
    #[error("{sentence}")]
    Failed {
        /// What kind of failure.
        kind: FailureKind,
        /// For people.
        sentence: String,
    },
    /// The reply does not fit the request.
    #[error("the monitor answered {request} with something else")]
    Unexpected {
        /// Which request.
        request: &'static str,
    },
}

/// For messages: a clause about a packet.
pub(crate) fn malformed<T>(why: impl Into<String>) -> Result<T> {
    Err(ControlError::Malformed(why.into()))
}
