//! Copying the process, which copies the machine.
//!
//! Why that is safe in a process with several threads: only the calling thread exists in the copy, so a lock that
//! another held would stay locked for ever. Here the others are vCPU threads, and they are parked: they
//! wait on a condition and hold nothing. There is no log thread, no async runtime, and the C library takes care of its
//! own locks. The copy closes every descriptor that it is not told to keep: what the parent's objects hold is not
//! its business. Those objects are never dropped in it; it forgets them, builds its own, and ends by `_exit`.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
};

/// Where we are after a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// In the process that was there before.
    Parent {
        /// The copy.
        child: u32,
    },
    /// In the copy.
    Child,
}

/// Copies the calling process. The copy keeps the standard descriptors and those in `keep`; the others are closed,
/// so whatever owns them there must be forgotten, not dropped.
///
/// # Errors
/// Without room for a process or its page tables. A copy that cannot close its descriptors ends at once.
pub fn fork(keep: &[BorrowedFd<'_>]) -> io::Result<Side> {
    let keep = sorted(keep);
    // SAFETY: the copy has one thread. No other thread of this process holds a lock at this point (see above),
    // and the C library keeps its own usable across a fork.
    let pid = unsafe { libc::fork() };
    match pid {
        ..0 => Err(io::Error::last_os_error()),
        0 => {
            if close_others(&keep).is_err() {
                exit(EXIT_DESCRIPTORS);
            }
            Ok(Side::Child)
        }
        child => Ok(Side::Parent { child: child.unsigned_abs() }),
    }
}

/// Status of a copy that could not close what it inherited.
pub const EXIT_DESCRIPTORS: i32 = 71;

/// Ends the process, running no destructor: those would be the parent's.
pub fn exit(status: i32) -> ! {
    // SAFETY: nothing of this process is used afterwards.
    unsafe { libc::_exit(status) }
}

/// Leaves the ends of children to the kernel: nobody here waits for them, the node watches them by descriptor.
pub fn ignore_children() -> io::Result<()> {
    // SAFETY: ignoring a signal installs no code.
    match unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Closes every descriptor but the standard ones and these: what a process was started with by accident.
pub fn close_all_but(keep: &[BorrowedFd<'_>]) -> io::Result<()> {
    close_others(&sorted(keep))
}

fn sorted(keep: &[BorrowedFd<'_>]) -> Vec<RawFd> {
    let mut keep: Vec<RawFd> = keep.iter().map(AsRawFd::as_raw_fd).chain(0..=2).collect();
    keep.sort_unstable();
    keep.dedup();
    keep
}

/// Closes what lies between the sorted descriptors.
fn close_others(keep: &[RawFd]) -> io::Result<()> {
    let mut next = 0;
    for fd in keep.iter().map(|fd| fd.unsigned_abs()).chain([u32::MAX]) {
        if next < fd {
            let last = if fd == u32::MAX { fd } else { fd - 1 };
            // SAFETY: who calls says that nothing will use these descriptors.
            let done = unsafe { libc::syscall(libc::SYS_close_range, next, last, 0) };
            if done != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        next = fd.saturating_add(1);
    }
    Ok(())
}
