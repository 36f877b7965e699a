//! What can go wrong between a node and a monitor.

use crate::{FailureKind, Role, VERSION};
use std::io;

pub type Result<T, E = ControlError> = std::result::Result<T, E>;

/// Why a message did not come through, or what the other side said instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    #[error("the control socket cannot be used")]
    Io(#[from] io::Error),
    #[error("the control socket was closed")]
    Closed,
    #[error("no answer came on the control socket in time")]
    TimedOut,
    /// The other side speaks another version.
    #[error("the other side of the control socket speaks version {theirs}, this program version {}", VERSION)]
    Version { theirs: u32 },
    /// A packet that is none of ours. One clause.
    #[error("a message on the control socket is malformed: {0}")]
    Malformed(String),
    /// A request came without a descriptor that it needs.
    #[error("{request} needs a descriptor for {role}, and has none")]
    Missing { request: &'static str, role: Role },
    /// A request came with a descriptor that it does not take, or too many of a kind.
    #[error("{request} takes at most {most} descriptors for {role}, and has {count}")]
    TooMany {
        request: &'static str,
        role: Role,
        /// How many it may have.
        most: usize,
        /// How many it has.
        count: usize,
    },
    /// The monitor refused or failed, and nothing changed.
    #[error("{sentence}")]
    Failed { kind: FailureKind, sentence: String },
    /// The reply does not fit the request.
    #[error("the monitor answered {request} with something else")]
    Unexpected { request: &'static str },
}

/// For messages: a clause about a packet.
pub(crate) fn malformed<T>(why: impl Into<String>) -> Result<T> {
    Err(ControlError::Malformed(why.into()))
}
