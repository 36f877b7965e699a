//! Copies the process, which copies the machine.
//!
//! Why this is safe in a process with several threads: only the calling thread exists in the copy,
//! so a lock that another thread held would stay locked for ever. The other threads here are vCPU
//! threads, and they are parked: they wait on a condition and hold no lock. There is no log thread
//! and no async runtime, and the C library takes care of its own locks. The copy closes every
//! descriptor that it is not told to keep. It never drops the objects of its parent: it forgets
//! them, builds its own, and ends by `_exit`.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
};

/// The side of a fork that this process is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Parent {
        /// Process id of the copy.
        child: u32,
    },
    Child,
}

/// Copies the calling process. The copy keeps the standard descriptors and those in `keep`, and
/// closes the others. Objects that own them must be forgotten in the copy, not dropped.
///
/// # Errors
/// Without room for a process or its page tables. A copy that cannot close its descriptors ends at
/// once.
pub fn fork(keep: &[BorrowedFd<'_>]) -> io::Result<Side> {
    let keep = sorted(keep);
    // SAFETY: the copy has one thread. No other thread of this process holds a lock now (see
    // above), and the C library keeps its own locks usable across a fork.
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

/// Ends the process without running destructors.
pub fn exit(status: i32) -> ! {
    // SAFETY: nothing of this process is used afterwards.
    unsafe { libc::_exit(status) }
}

/// Lets the kernel reap children. This process does not wait for them, and the node watches them by
/// descriptor.
pub fn ignore_children() -> io::Result<()> {
    // SAFETY: ignoring a signal installs no code.
    match unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Closes every descriptor but the standard ones and those in `keep`.
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
            // SAFETY: the caller guarantees that nothing uses these descriptors afterwards.
            let done = unsafe { libc::syscall(libc::SYS_close_range, next, last, 0) };
            if done != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        next = fd.saturating_add(1);
    }
    Ok(())
}
