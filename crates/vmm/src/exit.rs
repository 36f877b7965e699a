//! How a monitor process ends, and how it reports why.

use crate::Error;
use keiki_control::ControlError;
use std::os::fd::OwnedFd;

/// The machine has ended. Its console log holds the reason.
pub const EXIT_END: i32 = 0;
/// The process could not start.
pub const EXIT_START: i32 = 64;
/// A copy could not become a machine. It has reported why.
pub const EXIT_THAW: i32 = 65;
/// A bug of the monitor.
pub const EXIT_PANIC: i32 = 70;

/// Ends the process at once, without running destructors.
pub fn exit_with(status: i32) -> ! {
    keiki_hv::fork::exit(status)
}

/// Sends the standard error of a copy to `pipe`.
pub fn redirect_stderr(pipe: Option<&OwnedFd>) -> crate::Result<()> {
    let Some(pipe) = pipe else { return Ok(()) };
    rustix::stdio::dup2_stderr(pipe).map_err(|error| Error::Host("redirecting standard error", error.into()))
}

/// Whether a connection cannot be used after this error.
pub fn is_broken(error: &ControlError) -> bool {
    matches!(error, ControlError::Io(_) | ControlError::Closed | ControlError::TimedOut)
}
