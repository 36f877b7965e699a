//! Commands: how they are started and found again, and how long they are remembered.
//!
//! A session belongs to the guest, not to the connection that started it. It is kept for a while
//! after its end, so that a caller that lost its connection can still fetch the rest.

mod plan;
mod pump;
mod session;

pub use session::{Reader, event};

use crate::{cgroup::Group, log, reaper::Reaper, sys};
use keiki_protocol::guest::{ExecInfo, ExecSpec, Exit, Pty};
use parking_lot::Mutex;
use plan::Ends;
use pump::{Source, pump, supervise};
use rustix::process::{Pid, Signal, kill_process};
use session::{Channel, Session, SessionSpec};
use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock},
    task::{spawn_blocking, yield_now},
    time::timeout,
};

/// Commands that may run at once.
const MAX_RUNNING: usize = 1024;
/// Ended commands that are remembered, of each kind, and their output.
const MAX_ENDED: usize = 128;
const MAX_ENDED_BYTES: usize = 8 << 20;
/// How long an ended command is remembered: an ordinary one, and one started with `keep`.
const MAX_ENDED_AGE: Duration = Duration::from_secs(120);
const MAX_KEPT_AGE: Duration = Duration::from_secs(24 * 3600);
const MAX_ID: usize = 64;
/// The exit code of a command that SIGKILL ended.
const KILLED: i32 = 128 + 9;
/// Unread input that is kept for all commands together.
const MAX_SPOOLED: usize = 64 << 20;
/// The character that ends the input of a terminal.
const END_OF_INPUT: u8 = 4;
/// Empty groups that are kept.
const MAX_SPARE: usize = 8;
/// How often to yield to the runtime until a command's last output has reached the port.
const YIELDS_AFTER_END: usize = 4;

/// Why a request about a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// No such command, or no longer.
    #[error("no such command: {0:?}")]
    Unknown(String),
    /// The id is taken.
    #[error("command {0:?} already exists")]
    Exists(String),
    /// Too many commands.
    #[error("{MAX_RUNNING} commands are already running")]
    TooMany,
    /// Too much unread input.
    #[error("commands already have {} MiB of unread input", MAX_SPOOLED >> 20)]
    InputFull,
    /// The command has ended.
    #[error("the command has ended")]
    Ended,
    /// The caller that started it still reads its output.
    #[error("the call that started the command still reads its output")]
    Taken,
    /// It has no terminal, or no open input.
    #[error("the command has no {0}")]
    Without(&'static str),
    /// Its standard streams could not be made.
    #[error("cannot make the command's standard streams")]
    Streams(#[source] io::Error),
    /// Its control group could not be made.
    #[error("cannot make the command's control group")]
    Group(#[source] io::Error),
    /// Something else failed.
    #[error("the agent failed")]
    Agent(#[source] io::Error),
}

/// The result of a start.
#[derive(Debug)]
pub enum Launched {
    /// It runs; the reader gets its output.
    Running(Reader),
    /// It did not start.
    Refused(Exit),
}

/// All commands of this machine.
#[derive(Debug)]
pub struct Execs {
    sessions: Mutex<HashMap<String, Entry>>,
    reaper: Arc<Reaper>,
    /// Held for reading while a process is started, for writing while user work is frozen: a child
    /// in a frozen group would never exec its program, and its parent would wait for it.
    gate: Arc<RwLock<()>>,
    /// Groups whose leader has ended but that still have processes.
    lingering: Mutex<Vec<Arc<Group>>>,
    /// Empty groups for the next commands.
    spare: Mutex<Vec<Arc<Group>>>,
    /// Number of groups made so far; each is named by its number.
    groups: AtomicU64,
}

#[derive(Debug)]
enum Entry {
    /// The id is taken, the process not started yet.
    Starting,
    Started(Arc<Session>),
}

impl Execs {
    /// No commands yet.
    pub fn new(reaper: Arc<Reaper>) -> Arc<Self> {
        Arc::new(Self {
            sessions: Mutex::default(),
            reaper,
            gate: Arc::default(),
            lingering: Mutex::default(),
            spare: Mutex::default(),
            groups: AtomicU64::new(0),
        })
    }

    fn find(&self, id: &str) -> Result<Arc<Session>, ExecError> {
        match self.sessions.lock().get(id) {
            Some(Entry::Started(session)) => Ok(session.clone()),
            _ => Err(ExecError::Unknown(id.chars().take(MAX_ID).collect())),
        }
    }

    /// Waits until no process is being started, and prevents new ones until the guard is dropped.
    pub async fn hold(&self) -> OwnedRwLockWriteGuard<()> {
        self.gate.clone().write_owned().await
    }

    /// Starts a command. While user work is frozen it waits for the thaw.
    pub async fn launch(self: &Arc<Self>, spec: ExecSpec) -> Result<Launched, ExecError> {
        check_id(&spec.id)?;
        let gate = self.gate.clone().read_owned().await;
        self.forget_old();
        self.reserve(&spec.id)?;
        let execs = self.clone();
        // On another thread: the file system of a program may be slow, or served by user work.
        let made = spawn_blocking(move || {
            let result = execs.make(&spec, gate);
            if !matches!(result, Ok(Launched::Running(_))) {
                execs.sessions.lock().remove(&spec.id);
            }
            result
        });
        made.await.unwrap_or_else(|error| Err(ExecError::Agent(io::Error::other(error))))
    }

    fn reserve(&self, id: &str) -> Result<(), ExecError> {
        let mut sessions = self.sessions.lock();
        if sessions.contains_key(id) {
            return Err(ExecError::Exists(id.to_owned()));
        }
        let live = |slot: &&Entry| !matches!(slot, Entry::Started(session) if session.ended().is_some());
        if sessions.values().filter(live).count() >= MAX_RUNNING {
            return Err(ExecError::TooMany);
        }
        sessions.insert(id.to_owned(), Entry::Starting);
        Ok(())
    }

    fn make(
        self: &Arc<Self>,
        spec: &ExecSpec,
        gate: OwnedRwLockReadGuard<()>,
    ) -> Result<Launched, ExecError> {
        let (plan, ends) = plan::plan(spec)?;
        let group = self.group().map_err(ExecError::Group)?;
        let start = self.reaper.start();
        let spawned = sys::spawn(&plan, group.directory());
        drop(gate);
        // The child has its own copies; those of the agent would keep the pipes open.
        drop(plan.stdio);
        let pid = match spawned {
            Ok(pid) => pid,
            Err(error) => {
                drop(start);
                self.keep(group);
                let (code, message) = plan::refusal(&error, spec);
                return Ok(Launched::Refused(Exit { code, message, ..Exit::default() }));
            }
        };
        let leader = start.started(pid);
        let attached = attach_ends(ends).map_err(ExecError::Streams);
        let (input, terminal, sources) = match attached {
            Ok(attached) => attached,
            Err(error) => {
                let _ = group.kill();
                self.lingering.lock().push(group);
                return Err(error);
            }
        };
        let (id, argv) = (spec.id.clone(), shown(spec));
        let session = Session::new(SessionSpec { id, argv, keep: spec.keep, pid, group, input, terminal });
        let reader = session.attach([0, 0])?;
        for source in &sources {
            tokio::spawn(pump(session.clone(), source.clone()));
        }
        let limit = (spec.timeout_ms > 0).then(|| Duration::from_millis(spec.timeout_ms));
        let (execs, watched) = (self.clone(), session.clone());
        tokio::spawn(async move {
            supervise(watched.clone(), sources, leader, limit).await;
            // Let callers that wait for the end have it first.
            for _ in 0..YIELDS_AFTER_END {
                yield_now().await;
            }
            if watched.ended().is_none_or(|(exit, _)| exit.code == KILLED) {
                watched.with_group(Group::retire);
            }
            match watched.return_group() {
                Some((group, true)) => execs.keep(group),
                Some((group, false)) => execs.lingering.lock().push(group),
                None => {}
            }
        });
        self.sessions.lock().insert(spec.id.clone(), Entry::Started(session));
        Ok(Launched::Running(reader))
    }

    /// Reads a command's output from these offsets. `polite`: not while the caller that started it
    /// still reads it.
    pub fn attach(&self, id: &str, offsets: [u64; 2], polite: bool) -> Result<Reader, ExecError> {
        let session = self.find(id)?;
        if polite && !session.keep && session.is_read() {
            return Err(ExecError::Taken);
        }
        session.attach(offsets)
    }

    /// Keeps this input until the command has read it, and then ends the input if `eof`. The caller
    /// need not wait; input that is written later comes after it.
    pub async fn spool(&self, id: &str, spooled: Spooled, eof: bool) -> Result<(), ExecError> {
        let session = self.find(id)?;
        let input = session.input.clone().lock_owned().await;
        tokio::spawn(async move {
            let mut input = input;
            // It is not an error if the command does not read its input.
            let _ = feed(&session, input.as_ref(), &spooled.data).await;
            if eof {
                match &session.terminal {
                    Some(_) => drop(feed(&session, input.as_ref(), &[END_OF_INPUT]).await),
                    None => drop(input.take()),
                }
            }
        });
        Ok(())
    }

    /// Writes to a command's input and returns how much it took. Less than all if the command no
    /// longer reads it.
    pub async fn input(&self, id: &str, data: &[u8]) -> Result<usize, ExecError> {
        let session = self.find(id)?;
        let guard = session.input.lock().await;
        feed(&session, guard.as_ref(), data).await
    }

    /// Ends a command's input. On a terminal, that is a keystroke.
    pub async fn end_input(&self, id: &str) -> Result<(), ExecError> {
        let session = self.find(id)?;
        if session.terminal.is_some() {
            self.input(id, &[END_OF_INPUT]).await?;
        } else {
            session.input.lock().await.take();
        }
        Ok(())
    }

    /// Signals the leader, or all of a command's processes.
    pub fn signal(&self, id: &str, number: i32, whole_group: bool) -> Result<(), ExecError> {
        let session = self.find(id)?;
        let signal = Signal::from_named_raw(number)
            .ok_or_else(|| ExecError::Invalid(format!("not a signal: {number}")))?;
        if !whole_group {
            return match session.signal_leader(signal).map_err(ExecError::Agent)? {
                true => Ok(()),
                false => Err(ExecError::Ended),
            };
        }
        let result = session.with_group(|group| match signal {
            Signal::KILL => group.kill(),
            _ => group.processes().map(|all| signal_all(&all, signal)),
        });
        match result.ok_or(ExecError::Ended)? {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ExecError::Ended),
            result => result.map_err(ExecError::Agent),
        }
    }

    /// Changes the size of a command's terminal.
    pub fn resize(&self, id: &str, size: &Pty) -> Result<(), ExecError> {
        let session = self.find(id)?;
        let terminal = session.terminal.as_ref().ok_or(ExecError::Without("terminal"))?;
        rustix::termios::tcsetwinsize(terminal.get_ref(), plan::winsize(size.cols, size.rows))
            .map_err(|error| ExecError::Agent(error.into()))
    }

    /// All commands that a caller may ask for, oldest first.
    pub fn list(&self) -> Vec<ExecInfo> {
        self.forget_old();
        let sessions = self.sessions.lock();
        let mut all: Vec<ExecInfo> = sessions
            .values()
            .filter_map(|slot| match slot {
                Entry::Started(session) if !session.is_reported() => Some(session.info()),
                Entry::Started(_) | Entry::Starting => None,
            })
            .collect();
        all.sort_by_key(|info| info.started_unix_ms);
        all
    }

    /// Kills what still runs of a command, and forgets it.
    pub fn forget(&self, id: &str) -> Result<(), ExecError> {
        let session = self.find(id)?;
        match session.with_group(Group::kill) {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                return Err(ExecError::Agent(error));
            }
            _ => {}
        }
        self.sessions.lock().remove(id);
        session.forget_output();
        Ok(())
    }

    fn forget_old(&self) {
        let mut sessions = self.sessions.lock();
        for (keep, age) in [(false, MAX_ENDED_AGE), (true, MAX_KEPT_AGE)] {
            let of_kind = |session: &Session| session.keep == keep && !session.is_read();
            let mut ended: Vec<_> = sessions
                .values()
                .filter_map(|slot| match slot {
                    Entry::Started(session) if of_kind(session) => {
                        session.ended().map(|(_, when)| (when, session.kept(), session.id.clone()))
                    }
                    _ => None,
                })
                .collect();
            ended.sort();
            let (mut count, mut bytes) = (0, 0);
            for (when, kept, id) in ended.into_iter().rev() {
                count += 1;
                bytes += kept;
                if count > MAX_ENDED || bytes > MAX_ENDED_BYTES || when.elapsed() > age {
                    // A pump of its pipes may keep the session, but does not need the output.
                    if let Some(Entry::Started(session)) = sessions.remove(&id) {
                        session.forget_output();
                    }
                }
            }
        }
    }

    /// An empty group for a command.
    fn group(&self) -> io::Result<Arc<Group>> {
        if let Some(group) = self.spare.lock().pop() {
            return Ok(group);
        }
        Group::new(&self.groups.fetch_add(1, Ordering::Relaxed).to_string()).map(Arc::new)
    }

    /// Keeps an empty, unused group for the next command.
    fn keep(&self, group: Arc<Group>) {
        let mut spare = self.spare.lock();
        if spare.len() < MAX_SPARE && group.is_reusable() {
            return spare.push(group);
        }
        drop(spare);
        if !group.remove() {
            self.lingering.lock().push(group);
        }
    }

    /// Removes groups that have become empty. Call it when an unknown process has ended.
    pub fn sweep_groups(&self) {
        self.lingering.lock().retain(|group| !group.remove());
    }
}

/// Input that is kept until the command reads it.
#[derive(Debug, Default)]
pub struct Spooled {
    data: Vec<u8>,
}

static SPOOLED: AtomicUsize = AtomicUsize::new(0);

impl Spooled {
    /// Adds input, if there is room for it.
    pub fn push(&mut self, data: &[u8]) -> Result<(), ExecError> {
        let all = SPOOLED.fetch_add(data.len(), Ordering::Relaxed) + data.len();
        self.data.extend_from_slice(data);
        if all > MAX_SPOOLED { Err(ExecError::InputFull) } else { Ok(()) }
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.data.len()
    }
}

impl Drop for Spooled {
    fn drop(&mut self) {
        SPOOLED.fetch_sub(self.data.len(), Ordering::Relaxed);
    }
}

/// Writes until all is taken or the command no longer reads it. Returns how much was taken.
async fn feed(session: &Session, input: Option<&File>, mut data: &[u8]) -> Result<usize, ExecError> {
    let Some(file) = input else { return Err(ExecError::Without("open input")) };
    let all = data.len();
    while !data.is_empty() {
        let write = file.async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, data)?));
        let written = tokio::select! {
            written = write => written,
            _ = session.wait_for(None, |session| session.ended()) => break,
        };
        match written {
            Ok(taken) => data = &data[taken..],
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPIPE | libc::EIO)) => break,
            Err(error) => return Err(ExecError::Agent(error)),
        }
    }
    Ok(all - data.len())
}

/// Sends a signal to processes; it is not an error if some have exited.
pub fn signal_all(processes: &[i32], signal: Signal) {
    for pid in processes.iter().filter_map(|&pid| Pid::from_raw(pid)) {
        let _ = kill_process(pid, signal);
    }
}

fn check_id(id: &str) -> Result<(), ExecError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if id.is_empty() || id.len() > MAX_ID || !id.bytes().all(plain) {
        let problem = format!("a command id is 1 to {MAX_ID} letters, digits, '-' and '_'");
        return Err(ExecError::Invalid(problem));
    }
    Ok(())
}

fn shown(spec: &ExecSpec) -> Vec<bytes::Bytes> {
    const LIMIT: usize = 4096;
    let words = if spec.argv.is_empty() { std::slice::from_ref(&spec.shell) } else { &spec.argv };
    let mut left = LIMIT;
    let mut all = vec![];
    for word in words {
        let take = word.len().min(left);
        all.push(bytes::Bytes::copy_from_slice(&word[..take]));
        left -= take;
        if left == 0 || all.len() == 256 {
            break;
        }
    }
    all
}

type File = Arc<AsyncFd<OwnedFd>>;

fn attach_ends(ends: Ends) -> io::Result<(Option<File>, Option<File>, Vec<Source>)> {
    let read = |fd| crate::sys::watch(fd, Interest::READABLE).map(Arc::new);
    match ends {
        Ends::Terminal(master) => {
            let input = Arc::new(crate::sys::watch(sys::duplicate(&master)?, Interest::WRITABLE)?);
            let output = read(master)?;
            Ok((Some(input), Some(output.clone()), vec![Source::new(Channel::Out, output)]))
        }
        Ends::Pipes { input, output, error } => {
            let input =
                input.map(|fd| crate::sys::watch(fd, Interest::WRITABLE).map(Arc::new)).transpose()?;
            let sources =
                vec![Source::new(Channel::Out, read(output)?), Source::new(Channel::Err, read(error)?)];
            Ok((input, None, sources))
        }
    }
}

/// Ends user work: SIGTERM first, then SIGKILL.
pub async fn end_user_work(grace: Duration) {
    let gone = async {
        while !crate::cgroup::user_processes().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    signal_all(&crate::cgroup::user_processes(), Signal::TERM);
    if timeout(grace, gone).await.is_err()
        && let Err(error) = crate::cgroup::kill_user()
    {
        log::line(&format!("user work: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::check_id;

    #[test]
    fn an_id_cannot_name_a_file_of_the_kernel() {
        for bad in ["", "cgroup.procs", "..", ".", "a/b", "ä", &"x".repeat(65)] {
            assert!(check_id(bad).is_err(), "{bad}");
        }
        for good in ["0198c9a2-7d0c-7000-8000-000000000000", "exec_1", "x"] {
            assert!(check_id(good).is_ok(), "{good}");
        }
    }
}
