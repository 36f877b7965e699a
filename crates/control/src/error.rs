//! Errors between a node and a monitor.

use crate::{FailureKind, Role, VERSION};
use std::io;

pub type Result<T, E = ControlError> = std::result::Result<T, E>;

/// Why a message did not get through, or what the monitor answered instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    #[error("the control socket cannot be used")]
    Io(#[from] io::Error),
    #[error("the control socket was closed")]
    Closed,
    #[error("no answer on the control socket in time")]
    TimedOut,
    #[error("the other side of the control socket speaks version {theirs}, this program version {}", VERSION)]
    Version { theirs: u32 },
    /// The packet is not a message. The text is one clause.
    #[error("a message on the control socket is malformed: {0}")]
    Malformed(String),
    #[error("{request} needs a descriptor for {role}, and has none")]
    Missing { request: &'static str, role: Role },
    #[error("{request} takes at most {most} descriptors for {role}, and has {count}")]
    TooMany { request: &'static str, role: Role, most: usize, count: usize },
    /// The monitor refused or failed. Nothing changed.
    #[error("{sentence}")]
    Failed { kind: FailureKind, sentence: String },
    #[error("the monitor sent an unexpected reply to {request}")]
    Unexpected { request: &'static str },
}

pub(crate) fn malformed<T>(why: impl Into<String>) -> Result<T> {
    Err(ControlError::Malformed(why.into()))
}
