//! Processes that outlive this one: started in their own session, watched and killed by descriptor,
//! never by number alone.

use crate::jail::Jail;
use rustix::{
    fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    io::{Errno, FdFlags, fcntl_setfd},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use std::{
    fs, io,
    os::unix::process::CommandExt,
    process::{ChildStderr, Command},
    time::Duration,
};

/// A process held by a descriptor. Its number may be reused; the descriptor never means another
/// process.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    start_time: u64,
    fd: OwnedFd,
}

/// How to start a process.
#[derive(Debug, Default)]
pub struct Setup {
    pub netns: Option<OwnedFd>,
    /// Descriptors that it inherits under the same numbers. It gets no others beside its standard
    /// streams.
    pub keep: Vec<OwnedFd>,
    /// Jail that it enters last.
    pub jail: Option<Jail>,
}

impl Process {
    /// Starts `command` in its own session. Also returns its standard error if the command pipes
    /// it.
    pub fn spawn(command: &mut Command, setup: Setup) -> io::Result<(Self, Option<ChildStderr>)> {
        let enter = move || {
            rustix::process::setsid()?;
            close_others_at_exec()?;
            for fd in &setup.keep {
                fcntl_setfd(fd, FdFlags::empty())?;
            }
            if let Some(netns) = &setup.netns {
                move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
            }
            setup.jail.as_ref().map_or(Ok(()), Jail::enter)
        };
        // SAFETY: between fork and exec the closure only makes system calls on descriptors and
        // strings that exist already. It neither allocates nor takes a lock.
        unsafe { command.pre_exec(enter) };
        let mut child = command.spawn()?;
        match Self::open(child.id()) {
            Ok(Some(process)) => Ok((process, child.stderr.take())),
            Ok(None) => Err(io::Error::other("the process exited immediately")),
            Err(error) => Err(error),
        }
    }

    /// Opens a process by its number. None if it does not exist.
    pub fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let fd = match pidfd_open(raw, PidfdFlags::NONBLOCK) {
            Ok(fd) => fd,
            // INVAL, and NOENT on newer kernels: the process has just ended, or the number now
            // belongs to a thread.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // The descriptor pins the process. Its start time tells whether the number meant it before.
        Ok(start_time(pid)?.map(|start_time| Self { pid, start_time, fd }))
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Clock ticks from the boot of the host to its start. Distinguishes it from a later owner of
    /// its number.
    #[must_use]
    pub fn start_time(&self) -> u64 {
        self.start_time
    }

    /// User and system CPU time. None if it has ended.
    pub fn cpu_time(&self) -> io::Result<Option<Duration>> {
        cpu_time(self.pid)
    }

    #[must_use]
    pub fn is_alive(&self) -> bool {
        lives(&self.fd)
    }

    /// Kills it. No error if it has ended.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether it runs as this user.
    #[must_use]
    pub fn runs_as(&self, user: u32) -> bool {
        // If it is alive afterwards, the number was still its own.
        runs_as(self.pid, user) && self.is_alive()
    }

    /// Whether it has ended. Reaps a child, and then returns how it ended, once.
    #[must_use]
    pub fn try_reap(&self) -> Option<String> {
        match waitid(WaitId::PidFd(self.fd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(None) => None,
            Ok(Some(status)) => Some(match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => format!("exit status {code}"),
                (_, Some(signal)) => format!("signal {signal}"),
                _ => "unknown status".into(),
            }),
            // Not our child, or reaped before.
            Err(_) => match lives(&self.fd) {
                true => None,
                false => Some("unknown status".into()),
            },
        }
    }
}

impl AsFd for Process {
    /// Readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl std::os::fd::AsRawFd for Process {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.fd.as_raw_fd()
    }
}

/// Takes a descriptor that this process has inherited, by its number. Its own children do not
/// inherit it.
pub fn inherited(fd: i32) -> io::Result<OwnedFd> {
    if fd < 3 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a number above the standard descriptors",
        ));
    }
    // SAFETY: the call sets flags only. It fails if nothing is open under this number.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and the parent has put it there for this process. Nothing else in this
    // process uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the process is neither gone nor a zombie. A pidfd is readable exactly when the process
/// has ended.
fn lives(fd: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(ready) if ready > 0)
}

/// The processes that run as this user, of those that existed when this was called.
pub fn of_user(user: u32) -> io::Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Checks the user again once the process is pinned: the number may have been reused.
        if runs_as(pid, user)
            && let Some(process) = Process::open(pid)?
            && runs_as(pid, user)
            && process.is_alive()
        {
            found.push(process);
        }
    }
    Ok(found)
}

fn runs_as(pid: u32, user: u32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return false };
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    users.split_ascii_whitespace().any(|id| id.parse() == Ok(user))
}

/// User and system CPU time of a process. None if it does not exist.
pub fn cpu_time(pid: u32) -> io::Result<Option<Duration>> {
    let Some([user, system]) = stat(pid, [14, 15])? else { return Ok(None) };
    let ticks = (user + system) as f64 / rustix::param::clock_ticks_per_second().max(1) as f64;
    Ok(Some(Duration::from_secs_f64(ticks)))
}

fn start_time(pid: u32) -> io::Result<Option<u64>> {
    Ok(stat(pid, [22])?.map(|[start]| start))
}

/// Fields of `/proc/PID/stat`, by their numbers in proc(5). The name before them may contain
/// anything, so they are counted from its end.
fn stat<const N: usize>(pid: u32, fields: [usize; N]) -> io::Result<Option<[u64; N]>> {
    /// The first field behind the name.
    const STATE: usize = 3;
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
        Err(error) => return Err(error),
    };
    let after: Vec<&str> =
        stat.rsplit_once(')').map_or("", |(_, after)| after).split_ascii_whitespace().collect();
    let number = |field: usize| after.get(field - STATE).and_then(|text| text.parse().ok());
    let mut numbers = [0; N];
    for (number_of, field) in numbers.iter_mut().zip(fields) {
        let Some(value) = number(field) else { return Ok(None) };
        *number_of = value;
    }
    Ok(Some(numbers))
}

/// Marks all descriptors but the standard streams close-on-exec. An inherited directory would lead
/// out of any jail, and some tools fail over descriptors that they did not open. Needs Linux 5.11.
pub fn close_others_at_exec() -> io::Result<()> {
    // SAFETY: it sets a flag of descriptors and touches no memory.
    match unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Process, Setup};
    use rustix::{fd::AsRawFd, io::FdFlags};
    use std::{io::Read, process::Command, process::Stdio};

    #[test]
    fn it_has_what_it_was_given_and_nothing_else() -> std::io::Result<()> {
        let left = std::fs::File::open("/")?;
        rustix::io::fcntl_setfd(&left, FdFlags::empty())?;
        let keep = std::fs::File::open("/dev/null")?;
        let line = format!(
            "[ -e /proc/self/fd/{} ] || echo given is missing >&2; [ ! -e /proc/self/fd/{} ] || echo left is there >&2; echo end >&2",
            keep.as_raw_fd(),
            left.as_raw_fd()
        );
        let setup = Setup { keep: vec![keep.into()], ..Setup::default() };
        let mut command = Command::new("sh");
        command.args(["-c", &line]).stderr(Stdio::piped());
        let (process, stderr) = Process::spawn(&mut command, setup)?;
        let mut said = String::new();
        stderr.ok_or_else(|| std::io::Error::other("no stderr"))?.read_to_string(&mut said)?;
        assert_eq!(said, "end\n");
        while process.try_reap().is_none() {}
        Ok(())
    }

    #[test]
    fn cpu_time_grows_with_work() -> std::io::Result<()> {
        let used = || super::cpu_time(std::process::id()).map(Option::unwrap_or_default);
        let before = used()?;
        let begun = std::time::Instant::now();
        while used()? <= before {
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "no time passed");
        }
        assert!(super::cpu_time(u32::MAX)?.is_none());
        Ok(())
    }

    #[test]
    fn a_users_processes_are_found() -> std::io::Result<()> {
        let user = rustix::process::getuid().as_raw();
        let (process, _) = Process::spawn(Command::new("sleep").arg("60"), Setup::default())?;
        let found = |user| {
            let found = super::of_user(user)?;
            std::io::Result::Ok(
                found
                    .iter()
                    .any(|other| other.start_time() == process.start_time() && other.pid() == process.pid()),
            )
        };
        assert!(found(user)? && !found(user + 4_000_000)?);
        process.kill()?;
        while process.is_alive() {}
        assert!(!found(user)?, "one that has ended");
        assert!(process.try_reap().is_some());
        Ok(())
    }

    #[test]
    fn a_thread_is_no_process() -> std::io::Result<()> {
        let thread = || Process::open(rustix::thread::gettid().as_raw_pid().unsigned_abs());
        assert!(std::thread::spawn(thread).join().map_err(|_| std::io::Error::other("panic"))??.is_none());
        Ok(())
    }

    #[test]
    fn spawned_is_killed_and_reaped() -> std::io::Result<()> {
        let (process, _) = Process::spawn(Command::new("sleep").arg("60"), Setup::default())?;
        assert_eq!(process.try_reap(), None);
        assert!(process.is_alive());
        let again = Process::open(process.pid())?.ok_or_else(|| std::io::Error::other("gone"))?;
        assert_eq!(again.start_time(), process.start_time());
        assert!(process.cpu_time()?.is_some_and(|used| used < std::time::Duration::from_secs(5)));
        process.kill()?;
        let how = loop {
            if let Some(how) = process.try_reap() {
                break how;
            }
            std::thread::yield_now();
        };
        assert_eq!(how, "signal 9");
        assert!(!process.is_alive());
        process.kill()?;
        assert!(Process::open(process.pid())?.is_none_or(|other| other.start_time() != process.start_time()));
        Ok(())
    }
}
