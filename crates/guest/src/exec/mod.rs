//! Commands: starting them, finding them again, and how long they are remembered.
//!
//! A session belongs to the guest, not to the connection that asked for it. It is kept for a while after its
//! end, so that whoever lost the connection can still fetch the rest.

mod plan;
mod pump;
mod session;

pub use session::{Reader, event};

use crate::{cgroup::Group, log, reaper::Reaper, sys};
use keiki_protocol::guest::{ExecInfo, ExecSpec, Exit, Pty};
use plan::Ends;
use pump::{Source, pump, supervise};
use rustix::process::{Pid, Signal, kill_process};
use session::{Birth, Channel, Session};
use std::{
    collections::HashMap,
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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

/// Commands that run at once.
const MAX_RUNNING: usize = 1024;
/// Ended commands remembered, of each sort: how many, with how much output.
const MAX_ENDED: usize = 128;
const MAX_ENDED_BYTES: usize = 8 << 20;
/// For how long, where somebody heard of the end, and where perhaps nobody did.
const MAX_ENDED_AGE: Duration = Duration::from_secs(120);
const MAX_KEPT_AGE: Duration = Duration::from_secs(24 * 3600);
const MAX_ID: usize = 64;
/// The code of a command that SIGKILL ended.
const KILLED: i32 = 128 + 9;
/// Input that is kept for all commands together, until they read it.
const MAX_SPOOLED: usize = 64 << 20;
/// What ends the input of a terminal.
const END_OF_INPUT: u8 = 4;
/// Empty groups kept.
const MAX_SPARE: usize = 8;
/// Turns of the runtime that a command's last words take to the port.
const AFTER_THE_END: usize = 4;

/// Why a request about a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The request makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// There is none of that name, or no longer.
    #[error("no command {0:?}")]
    Unknown(String),
    /// There is one of that name already.
    #[error("a command {0:?} exists")]
    Exists(String),
    /// Too many.
    #[error("{MAX_RUNNING} commands run already")]
    TooMany,
    /// No room for more input.
    #[error("commands have {} MiB of input already that they do not read", MAX_SPOOLED >> 20)]
    InputFull,
    /// It has ended.
    #[error("the command has ended")]
    Ended,
    /// Its output is somebody's.
    #[error("the command belongs to the call that started it, which still reads it")]
    Taken,
    /// It never had what was asked for.
    #[error("the command has no {0}")]
    Without(&'static str),
    /// No streams for it.
    #[error("cannot make the command's standard streams")]
    Streams(#[source] io::Error),
    /// No control group for it.
    #[error("cannot make the command's control group")]
    Group(#[source] io::Error),
    /// Something else went wrong.
    #[error("the agent failed")]
    Agent(#[source] io::Error),
}

/// What came of a start.
#[derive(Debug)]
pub enum Launched {
    /// It runs; this reads it.
    Running(Reader),
    /// It did not start.
    Refused(Exit),
}

/// All commands of this machine.
#[derive(Debug)]
pub struct Execs {
    sessions: Mutex<HashMap<String, Slot>>,
    reaper: Arc<Reaper>,
    /// Held for reading while a process is made, for writing while user work is frozen: a child made into a
    /// frozen group would never reach its program, and its parent would wait for it.
    gate: Arc<RwLock<()>>,
    /// Groups whose leader has ended but that still have processes.
    lingering: Mutex<Vec<Arc<Group>>>,
    /// Empty groups for the next commands.
    spare: Mutex<Vec<Arc<Group>>>,
    /// Groups made so far; each is named by its number.
    groups: AtomicU64,
}

#[derive(Debug)]
enum Slot {
    /// The name is taken, the process not made yet.
    Starting,
    Made(Arc<Session>),
}

impl Execs {
    /// None yet.
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

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        lock(&self.sessions)
    }

    fn find(&self, id: &str) -> Result<Arc<Session>, ExecError> {
        match self.lock().get(id) {
            Some(Slot::Made(session)) => Ok(session.clone()),
            _ => Err(ExecError::Unknown(id.chars().take(MAX_ID).collect())),
        }
    }

    /// Waits until no process is being made, and holds back new ones until the guard is dropped.
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
        // On a thread of its own: the file systems below a program may be slow, or served by user work.
        let made = spawn_blocking(move || {
            let result = execs.make(&spec, gate);
            if !matches!(result, Ok(Launched::Running(_))) {
                execs.lock().remove(&spec.id);
            }
            result
        });
        made.await.unwrap_or_else(|error| Err(ExecError::Agent(io::Error::other(error))))
    }

    fn reserve(&self, id: &str) -> Result<(), ExecError> {
        let mut sessions = self.lock();
        if sessions.contains_key(id) {
            return Err(ExecError::Exists(id.to_owned()));
        }
        let live = |slot: &&Slot| !matches!(slot, Slot::Made(session) if session.ended().is_some());
        if sessions.values().filter(live).count() >= MAX_RUNNING {
            return Err(ExecError::TooMany);
        }
        sessions.insert(id.to_owned(), Slot::Starting);
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
        // The child has its own copies; the agent's would keep the pipes from ending.
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
                lock(&self.lingering).push(group);
                return Err(error);
            }
        };
        let (id, argv) = (spec.id.clone(), shown(spec));
        let session = Session::new(Birth { id, argv, keep: spec.keep, pid, group, input, terminal });
        let reader = session.attach([0, 0])?;
        for source in &sources {
            tokio::spawn(pump(session.clone(), source.clone()));
        }
        let limit = (spec.timeout_ms > 0).then(|| Duration::from_millis(spec.timeout_ms));
        let (execs, watched) = (self.clone(), session.clone());
        tokio::spawn(async move {
            supervise(watched.clone(), sources, leader, limit).await;
            // First let those who wait for the end have it.
            for _ in 0..AFTER_THE_END {
                yield_now().await;
            }
            if watched.ended().is_none_or(|(exit, _)| exit.code == KILLED) {
                watched.with_group(Group::wear_out);
            }
            match watched.give_back_group() {
                Some((group, true)) => execs.keep(group),
                Some((group, false)) => lock(&execs.lingering).push(group),
                None => {}
            }
        });
        self.lock().insert(spec.id.clone(), Slot::Made(session));
        Ok(Launched::Running(reader))
    }

    /// Reads a command from these offsets on. `polite`: not if the caller who started it still does.
    pub fn attach(&self, id: &str, offsets: [u64; 2], polite: bool) -> Result<Reader, ExecError> {
        let session = self.find(id)?;
        if polite && !session.keep && session.is_read() {
            return Err(ExecError::Taken);
        }
        session.attach(offsets)
    }

    /// Keeps all of this input until the command has read it, and then ends the input if asked to. Whoever sent it need
    /// not wait, and what is written later comes after it.
    pub async fn spool(&self, id: &str, spooled: Spooled, eof: bool) -> Result<(), ExecError> {
        let session = self.find(id)?;
        let input = session.input.clone().lock_owned().await;
        tokio::spawn(async move {
            let mut input = input;
            // A command that does not read its input is no error.
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

    /// Writes to a command's input; returns how much was taken. Less than all: nobody reads it any more.
    pub async fn input(&self, id: &str, data: &[u8]) -> Result<usize, ExecError> {
        let session = self.find(id)?;
        let guard = session.input.lock().await;
        feed(&session, guard.as_ref(), data).await
    }

    /// Ends a command's input. On a terminal that is a keystroke.
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
            .ok_or_else(|| ExecError::Invalid(format!("{number} is no signal")))?;
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

    /// All that somebody may ask for, oldest first.
    pub fn list(&self) -> Vec<ExecInfo> {
        self.forget_old();
        let sessions = self.lock();
        let mut all: Vec<ExecInfo> = sessions
            .values()
            .filter_map(|slot| match slot {
                Slot::Made(session) if !session.is_settled() => Some(session.info()),
                Slot::Made(_) | Slot::Starting => None,
            })
            .collect();
        all.sort_by_key(|info| info.started_unix_ms);
        all
    }

    /// Ends what still runs of a command and forgets it.
    pub fn forget(&self, id: &str) -> Result<(), ExecError> {
        let session = self.find(id)?;
        match session.with_group(Group::kill) {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                return Err(ExecError::Agent(error));
            }
            _ => {}
        }
        self.lock().remove(id);
        session.forget_output();
        Ok(())
    }

    fn forget_old(&self) {
        let mut sessions = self.lock();
        for (keep, age) in [(false, MAX_ENDED_AGE), (true, MAX_KEPT_AGE)] {
            let of_sort = |session: &Session| session.keep == keep && !session.is_read();
            let mut ended: Vec<_> = sessions
                .values()
                .filter_map(|slot| match slot {
                    Slot::Made(session) if of_sort(session) => {
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
                    // Whoever still reads its pipes keeps the session, but needs none of this.
                    if let Some(Slot::Made(session)) = sessions.remove(&id) {
                        session.forget_output();
                    }
                }
            }
        }
    }

    /// An empty group.
    fn group(&self) -> io::Result<Arc<Group>> {
        if let Some(group) = lock(&self.spare).pop() {
            return Ok(group);
        }
        Group::new(&self.groups.fetch_add(1, Ordering::Relaxed).to_string()).map(Arc::new)
    }

    /// Keeps a group that is empty and nobody's for the next command.
    fn keep(&self, group: Arc<Group>) {
        let mut spare = lock(&self.spare);
        if spare.len() < MAX_SPARE && group.is_reusable() {
            return spare.push(group);
        }
        drop(spare);
        if !group.remove() {
            lock(&self.lingering).push(group);
        }
    }

    /// Removes groups that have become empty. To be called when something unknown has ended.
    pub fn sweep_groups(&self) {
        lock(&self.lingering).retain(|group| !group.remove());
    }
}

/// Input that is kept until it is read.
#[derive(Debug, Default)]
pub struct Spooled {
    data: Vec<u8>,
}

static SPOOLED: AtomicUsize = AtomicUsize::new(0);

impl Spooled {
    /// Takes more, if there is room for it.
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

/// Writes until all is taken, or nobody reads it any more; how much that was.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends a signal to processes; those that have ended meanwhile are no error.
pub fn signal_all(processes: &[i32], signal: Signal) {
    for pid in processes.iter().filter_map(|&pid| Pid::from_raw(pid)) {
        let _ = kill_process(pid, signal);
    }
}

fn check_id(id: &str) -> Result<(), ExecError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if id.is_empty() || id.len() > MAX_ID || !id.bytes().all(plain) {
        let problem = format!("a command's id is 1 to {MAX_ID} letters, digits, '-' and '_'");
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

/// Ends user work: a request first, then without asking.
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
