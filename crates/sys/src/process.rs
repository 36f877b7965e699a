//! Processes by descriptor: a pidfd never names another process than the one it was opened for.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// A process that may be ours or not.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    start: u64,
    fd: OwnedFd,
}

impl Process {
    /// The process with this number, now.
    ///
    /// # Errors
    /// If there is none.
    pub fn open(pid: u32) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let fd = pidfd_open(raw, PidfdFlags::NONBLOCK)?;
        // After the descriptor: a number that was taken over meanwhile has another start time.
        let start = start_time(pid)?;
        Ok(Self { pid, start, fd })
    }

    /// The process that had this number and start time, if it still runs.
    #[must_use]
    pub fn reopen(pid: u32, start: u64) -> Option<Self> {
        Self::open(pid).ok().filter(|process| process.start == start)
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// When it started, in clock ticks since boot: with the number, its name for ever.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Ends it. Ended already: no error.
    ///
    /// # Errors
    /// If it may not be signalled.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Another descriptor of the same process. It polls readable once the process has ended.
    ///
    /// # Errors
    /// If there are too many descriptors.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Field 22 of `/proc/PID/stat`; the second field, a name in brackets, may contain anything.
fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    let field = after_name.split_ascii_whitespace().nth(19);
    field.and_then(|field| field.parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::Process;

    #[test]
    fn a_recycled_number_is_not_taken_for_the_process() -> std::io::Result<()> {
        let me = Process::open(std::process::id())?;
        assert!(Process::reopen(me.pid(), me.start()).is_some());
        assert!(Process::reopen(me.pid(), me.start() + 1).is_none());
        let mut child = std::process::Command::new("sleep").arg("60").spawn()?;
        let process = Process::open(child.id())?;
        process.kill()?;
        child.wait()?;
        process.kill()?;
        assert!(Process::reopen(process.pid(), process.start()).is_none());
        Ok(())
    }
}
