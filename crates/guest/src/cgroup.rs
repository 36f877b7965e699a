//! Control groups: one for the agent, one for all user work, and below that one for each command.
//!
//! Freezing user work is one write to its top group. The kernel stops each process the next time it
//! would return to user mode, and reports that in `cgroup.events`.
//!
//! Creating and removing a group takes the kernel longer than starting a small program. So empty
//! groups are reused, and files on the fast path stay open.

use crate::{log, sys};
use rustix::fs::{Mode, OFlags};
use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{io::Interest, time::timeout};

const ROOT: &str = "/sys/fs/cgroup";
const AGENT: &str = "/sys/fs/cgroup/keiki";
const USER: &str = "/sys/fs/cgroup/user";

/// Creates the groups and moves this process into the agent's. Controllers are optional.
pub fn prepare() -> io::Result<()> {
    fs::create_dir_all(AGENT)?;
    fs::create_dir_all(USER)?;
    fs::write(Path::new(AGENT).join("cgroup.procs"), "0")?;
    for controller in ["+memory", "+pids", "+cpu"] {
        // The kernel may lack it, or use it for cgroup v1.
        let _ = fs::write(Path::new(ROOT).join("cgroup.subtree_control"), controller);
    }
    Ok(())
}

/// The group of one command.
#[derive(Debug)]
pub struct Group {
    path: PathBuf,
    directory: OwnedFd,
    events: OwnedFd,
    killed: AtomicBool,
}

impl Group {
    /// Creates a group for user work. `name` is a plain file name without a dot: names with dots
    /// belong to the kernel.
    pub fn new(name: &str) -> io::Result<Self> {
        Self::make(Path::new(USER).join(name))
    }

    /// Creates a group outside user work, which is not frozen with it.
    pub fn of_agent(name: &str) -> io::Result<Self> {
        Self::make(Path::new(ROOT).join(name))
    }

    fn make(path: PathBuf) -> io::Result<Self> {
        fs::create_dir(&path)?;
        let open = |path: &Path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
        let opened = open(&path, OFlags::PATH | OFlags::DIRECTORY)
            .and_then(|directory| Ok((directory, open(&path.join("cgroup.events"), OFlags::RDONLY)?)));
        match opened {
            Ok((directory, events)) => Ok(Self { path, directory, events, killed: AtomicBool::new(false) }),
            Err(error) => {
                // It is still empty.
                let _ = fs::remove_dir(&path);
                Err(error.into())
            }
        }
    }

    /// The directory of the group, to start a process in it.
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Whether no process is in it or in a group below it.
    pub fn is_empty(&self) -> bool {
        says(&self.events, b"populated 0").is_ok_and(|empty| empty)
    }

    /// Whether the empty group can be used again. Not if user work created groups below it, and not
    /// if it was killed: Linux compares a count of kills with the one of the agent's group, and
    /// would kill the next process started in it.
    pub fn is_reusable(&self) -> bool {
        // Two links of its own, and one for each directory in it.
        let is_alone = rustix::fs::fstat(&self.directory).is_ok_and(|stat| stat.st_nlink <= 2);
        is_alone && !self.killed.load(Ordering::Relaxed)
    }

    /// Never use this group again: a process in it may have killed it.
    pub fn retire(&self) {
        self.killed.store(true, Ordering::Relaxed);
    }

    /// Kills every process in it.
    pub fn kill(&self) -> io::Result<()> {
        self.retire();
        fs::write(self.path.join("cgroup.kill"), "1")
    }

    /// The pids of its processes.
    pub fn processes(&self) -> io::Result<Vec<i32>> {
        let text = fs::read_to_string(self.path.join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Removes it. False if it is not empty.
    pub fn remove(&self) -> bool {
        match fs::remove_dir(&self.path) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }
}

/// Kills all user work.
pub fn kill_user() -> io::Result<()> {
    fs::write(Path::new(USER).join("cgroup.kill"), "1")
}

/// Freezes all user work and returns when it is frozen. On error, and if the caller stops waiting,
/// user work resumes.
pub async fn freeze_user(limit: Duration) -> io::Result<()> {
    let mut guard = ThawUnless { done: false };
    timeout(limit, freeze_and_wait()).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    guard.done = true;
    Ok(())
}

struct ThawUnless {
    done: bool,
}

impl Drop for ThawUnless {
    fn drop(&mut self) {
        if !self.done
            && let Err(error) = thaw_user()
        {
            log::line(&format!("user work: {error}"));
        }
    }
}

/// Resumes user work.
pub fn thaw_user() -> io::Result<()> {
    set_frozen(b"0")
}

fn set_frozen(how: &[u8]) -> io::Result<()> {
    static SWITCH: OnceLock<fs::File> = OnceLock::new();
    let open = || fs::OpenOptions::new().write(true).open(Path::new(USER).join("cgroup.freeze"));
    let switch = sys::kept_open(&SWITCH, open)?;
    rustix::io::pwrite(switch, how, 0)?;
    Ok(())
}

/// Whether there is any process of user work.
pub fn has_user_work() -> io::Result<bool> {
    static EVENTS: OnceLock<fs::File> = OnceLock::new();
    let events = sys::kept_open(&EVENTS, || fs::File::open(Path::new(USER).join("cgroup.events")))?;
    Ok(!says(events, b"populated 0")?)
}

async fn freeze_and_wait() -> io::Result<()> {
    let events = fs::File::open(Path::new(USER).join("cgroup.events"))?;
    let events = sys::watch(events.into(), Interest::PRIORITY)?;
    set_frozen(b"1")?;
    loop {
        if says(events.get_ref(), b"frozen 1")? {
            return Ok(());
        }
        // The kernel marks the file at each change; a missed mark costs some milliseconds.
        if let Ok(ready) = timeout(Duration::from_millis(5), events.ready(Interest::PRIORITY)).await {
            ready?.clear_ready();
        }
    }
}

/// Is this a line of a group's events now?
fn says(events: impl AsFd, what: &[u8]) -> io::Result<bool> {
    let mut text = [0; 256];
    let got = rustix::io::pread(events, &mut text, 0)?;
    Ok(has_line(&text[..got], what))
}

fn has_line(events: &[u8], what: &[u8]) -> bool {
    events.split(|&byte| byte == b'\n').any(|line| line == what)
}

/// Processes of all user work, by number, those of nested groups included.
pub fn user_processes() -> Vec<i32> {
    let mut found = vec![];
    let mut left = vec![PathBuf::from(USER)];
    while let Some(dir) = left.pop() {
        if let Ok(text) = fs::read_to_string(dir.join("cgroup.procs")) {
            found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
        }
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        left.extend(entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::has_line;

    #[test]
    fn only_a_whole_line_counts() {
        assert!(has_line(b"populated 1\nfrozen 1\n", b"frozen 1"));
        assert!(!has_line(b"populated 1\nfrozen 0\n", b"frozen 1"));
        assert!(!has_line(b"frozen 10\n", b"frozen 1"));
    }
}
