//! One command: its output so far, its end, and its reader.
//!
//! A command has at most one reader; a new one takes over. With a reader, a command that writes
//! faster is blocked. Without one, new output overwrites the oldest. In between there is a grace
//! period: a node that restarts finds all output.
//!
//! All commands together keep [`KEEP_ALL`] bytes. Beyond that, a stream without a reader keeps its
//! last [`SCARCE`] bytes, and one with a reader blocks its command sooner. So a reader loses
//! nothing, and a thousand commands without readers do not fill the memory.

use super::ExecError;
use crate::{cgroup::Group, ring::Ring};
use bytes::Bytes;
use keiki_protocol::guest::{ExecEvent, ExecInfo, Exit, Output, Started, exec_event::Event};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::Pid;
use std::{
    os::fd::OwnedFd,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{io::unix::AsyncFd, sync::Notify};
use tonic::Status;

/// Output kept per stream. More than a connection can have in flight, see `keiki_protocol::client`.
const KEEP: usize = 1 << 20;
/// How far a reader may be behind before the command is blocked.
const AHEAD: usize = 256 << 10;
/// Output of all sessions together, before each is kept short.
const KEEP_ALL: usize = 24 << 20;
/// Output kept per stream beyond that, and how far its reader may be behind.
const SCARCE: usize = 16 << 10;
/// Largest piece of output sent at once.
const PIECE: usize = 32 << 10;
/// How long a command without a reader is treated as if it had one.
const GRACE: Duration = Duration::from_secs(3);

static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Standard output or standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// Standard output, or all output of a terminal.
    Out = 0,
    Err = 1,
}

/// A command, running or ended.
#[derive(Debug)]
pub struct Session {
    pub id: String,
    pub argv: Vec<Bytes>,
    pub started_unix_ms: u64,
    pub started: Instant,
    /// Remembered for long after its end.
    pub keep: bool,
    /// The pid of its leader.
    pub pid: Pid,
    /// The control group of its processes. None once all have exited and the group was returned.
    group: Mutex<Option<Arc<Group>>>,
    /// The agent's end of its input. None once it is closed.
    pub input: Arc<tokio::sync::Mutex<Option<Arc<AsyncFd<OwnedFd>>>>>,
    pub terminal: Option<Arc<AsyncFd<OwnedFd>>>,
    state: Mutex<State>,
    changed: Notify,
}

/// What a new session is made of. The fields are those of [`Session`].
#[derive(Debug)]
pub struct SessionSpec {
    pub id: String,
    pub argv: Vec<Bytes>,
    pub keep: bool,
    pub pid: Pid,
    pub group: Arc<Group>,
    pub input: Option<Arc<AsyncFd<OwnedFd>>>,
    pub terminal: Option<Arc<AsyncFd<OwnedFd>>>,
}

#[derive(Debug)]
struct State {
    rings: [Ring; 2],
    /// The leader is not reaped yet: its pid still belongs to this command.
    leader_lives: bool,
    exit: Option<(Exit, Instant)>,
    /// A reader got the exit event.
    reported: bool,
    /// The attached reader; readers are numbered from 1.
    reader: Option<u64>,
    readers: u64,
    /// Offsets up to which the reader was sent output.
    sent: [u64; 2],
    /// Since when there is no reader.
    alone: Instant,
}

impl Session {
    /// The session of a command that was just started.
    pub fn new(spec: SessionSpec) -> Arc<Self> {
        let started_unix_ms = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
        let state = State {
            rings: [Ring::new(KEEP), Ring::new(KEEP)],
            leader_lives: true,
            exit: None,
            reported: false,
            reader: None,
            readers: 0,
            sent: [0; 2],
            alone: Instant::now(),
        };
        Arc::new(Self {
            id: spec.id,
            argv: spec.argv,
            keep: spec.keep,
            started_unix_ms,
            started: Instant::now(),
            pid: spec.pid,
            group: Mutex::new(Some(spec.group)),
            input: Arc::new(tokio::sync::Mutex::new(spec.input)),
            terminal: spec.terminal,
            state: Mutex::new(state),
            changed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until `look` returns something. It is called again after each change and, at the
    /// latest, after `limit`; then its answer is final.
    pub async fn wait_for<T>(
        &self,
        limit: Option<Duration>,
        mut look: impl FnMut(&Self) -> Option<T>,
    ) -> Option<T> {
        let wait = async {
            loop {
                let mut change = pin!(self.changed.notified());
                change.as_mut().enable();
                if let Some(found) = look(self) {
                    return found;
                }
                change.await;
            }
        };
        match limit {
            None => Some(wait.await),
            Some(limit) => match tokio::time::timeout(limit, wait).await {
                Ok(found) => Some(found),
                Err(_) => look(self),
            },
        }
    }

    /// Wakes everything that waits for a change.
    pub fn touch(&self) {
        self.changed.notify_waiters();
    }

    /// Number of bytes of a stream so far.
    pub fn end(&self, channel: Channel) -> u64 {
        self.lock().rings[channel as usize].end()
    }

    /// How much may be read from the command now. `Err` says how long to wait before asking again
    /// if nothing changes.
    pub fn room(&self, channel: Channel) -> Result<usize, Option<Duration>> {
        let state = self.lock();
        if state.exit.is_some() {
            return Ok(usize::MAX);
        }
        let alone = state.alone.elapsed();
        if state.reader.is_none() && alone >= GRACE {
            return Ok(usize::MAX);
        }
        let at = channel as usize;
        let behind =
            usize::try_from(state.rings[at].end().saturating_sub(state.sent[at])).unwrap_or(usize::MAX);
        match ahead().saturating_sub(behind) {
            0 if state.reader.is_some() => Err(None),
            0 => Err(Some(GRACE.saturating_sub(alone) + Duration::from_millis(1))),
            room => Ok(room),
        }
    }

    /// Adds output of the command. Output after its end is dropped.
    pub fn push(&self, channel: Channel, bytes: &[u8]) {
        let mut state = self.lock();
        if state.exit.is_some() {
            return;
        }
        let at = channel as usize;
        let is_read = state.reader.is_some() || state.alone.elapsed() < GRACE;
        let sent = if is_read { state.sent[at] } else { u64::MAX };
        let ring = &mut state.rings[at];
        let before = ring.len();
        ring.push(bytes);
        if is_scarce() {
            let unsent = usize::try_from(ring.end().saturating_sub(sent)).unwrap_or(usize::MAX);
            ring.keep_last(unsent.max(SCARCE));
        }
        let after = ring.len();
        drop(state);
        KEPT.fetch_add(after, Ordering::Relaxed);
        KEPT.fetch_sub(before, Ordering::Relaxed);
        self.touch();
    }

    /// The leader was reaped: its pid may belong to another process from now on.
    pub fn leader_ended(&self) {
        self.lock().leader_lives = false;
    }

    /// Calls `work` with its group, unless the group was returned.
    pub fn with_group<T>(&self, work: impl FnOnce(&Group) -> T) -> Option<T> {
        self.group.lock().as_deref().map(work)
    }

    /// Its group after its end, and whether the group is empty. An empty group no longer belongs to
    /// this command.
    pub fn return_group(&self) -> Option<(Arc<Group>, bool)> {
        let mut group = self.group.lock();
        let is_empty = group.as_ref()?.is_empty();
        let given = if is_empty { group.take() } else { group.clone() };
        Some((given?, is_empty))
    }

    /// Sends a signal to the leader. False if it has exited.
    pub fn signal_leader(&self, signal: rustix::process::Signal) -> std::io::Result<bool> {
        let state = self.lock();
        if state.leader_lives {
            rustix::process::kill_process(self.pid, signal)?;
        }
        Ok(state.leader_lives)
    }

    /// Ends the session. All output has been added.
    pub fn finish(&self, exit: Exit) {
        self.lock().exit = Some((exit, Instant::now()));
        self.touch();
    }

    /// How and when it ended, if it has.
    pub fn ended(&self) -> Option<(Exit, Instant)> {
        self.lock().exit.clone()
    }

    /// Whether a caller has seen the end of this command, so that it need not be listed.
    pub fn is_reported(&self) -> bool {
        !self.keep && self.lock().reported
    }

    /// Whether it has a reader.
    pub fn is_read(&self) -> bool {
        self.lock().reader.is_some()
    }

    /// Frees the memory of its output.
    pub fn forget_output(&self) {
        KEPT.fetch_sub(self.kept(), Ordering::Relaxed);
        self.lock().rings.iter_mut().for_each(|ring| ring.keep_last(0));
    }

    /// Bytes of output that it keeps.
    pub fn kept(&self) -> usize {
        self.lock().rings.iter().map(Ring::len).sum()
    }

    /// For lists.
    pub fn info(&self) -> ExecInfo {
        let state = self.lock();
        ExecInfo {
            id: self.id.clone(),
            argv: self.argv.clone(),
            started_unix_ms: self.started_unix_ms,
            exit: state.exit.as_ref().map(|(exit, _)| exit.clone()),
            stdout_bytes: state.rings[0].end(),
            stderr_bytes: state.rings[1].end(),
            pid: self.pid.as_raw_nonzero().get().unsigned_abs(),
            pty: self.terminal.is_some(),
            keep: self.keep,
            attached: state.reader.is_some(),
        }
    }

    /// Attaches a reader at these offsets. Skips output that was overwritten: the offsets of the
    /// events show that.
    pub fn attach(self: &Arc<Self>, offsets: [u64; 2]) -> Result<Reader, ExecError> {
        let mut state = self.lock();
        for (ring, offset) in state.rings.iter().zip(offsets) {
            if offset > ring.end() {
                return Err(ExecError::Invalid(format!(
                    "offset {offset} is beyond the end of the output at {} bytes",
                    ring.end()
                )));
            }
        }
        state.readers += 1;
        state.reader = Some(state.readers);
        state.sent = offsets;
        let number = state.readers;
        drop(state);
        self.touch();
        Ok(Reader { session: self.clone(), number, stage: Stage::Fresh, last: Channel::Err })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        KEPT.fetch_sub(self.kept(), Ordering::Relaxed);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Fresh,
    Running,
    Over,
}

/// One attached reader. Dropping it detaches.
#[derive(Debug)]
pub struct Reader {
    session: Arc<Session>,
    number: u64,
    stage: Stage,
    last: Channel,
}

impl Reader {
    /// The next event. None after the end.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, Status>> {
        match self.stage {
            Stage::Over => return None,
            Stage::Fresh => {
                self.stage = Stage::Running;
                let pid = self.session.pid.as_raw_nonzero().get().unsigned_abs();
                return Some(Ok(event(Event::Started(Started { id: self.session.id.clone(), pid }))));
            }
            Stage::Running => {}
        }
        let (number, last) = (self.number, self.last);
        let found = self.session.wait_for(None, |session| session.take(number, last)).await?;
        match &found {
            Ok((channel, event)) => {
                self.last = *channel;
                if matches!(event, Event::Exit(_)) {
                    self.stage = Stage::Over;
                }
            }
            Err(_) => self.stage = Stage::Over,
        }
        Some(found.map(|(_, what)| event(what)))
    }
}

impl Session {
    /// The next event for reader `number`. The stream that was not `last` comes first.
    fn take(&self, number: u64, last: Channel) -> Option<Result<(Channel, Event), Status>> {
        let mut state = self.lock();
        if state.reader != Some(number) {
            return Some(Err(Status::aborted("another caller now reads the output of this command")));
        }
        let order =
            if last == Channel::Out { [Channel::Err, Channel::Out] } else { [Channel::Out, Channel::Err] };
        for channel in order {
            let at = channel as usize;
            let Some((offset, data)) = state.rings[at].read(state.sent[at], PIECE) else { continue };
            state.sent[at] = offset + data.len() as u64;
            drop(state);
            self.touch();
            let output = Output { offset, data: data.into() };
            let event = if channel == Channel::Out { Event::Stdout(output) } else { Event::Stderr(output) };
            return Some(Ok((channel, event)));
        }
        let exit = state.exit.as_ref().map(|(exit, _)| exit.clone())?;
        state.reported = true;
        Some(Ok((last, Event::Exit(exit))))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.session.lock();
        if state.reader == Some(self.number) {
            state.reader = None;
            state.alone = Instant::now();
        }
        drop(state);
        self.session.touch();
    }
}

fn is_scarce() -> bool {
    KEPT.load(Ordering::Relaxed) > KEEP_ALL
}

/// How far a reader may be behind.
fn ahead() -> usize {
    if is_scarce() { SCARCE } else { AHEAD }
}

/// Wraps an event for the wire.
pub fn event(event: Event) -> ExecEvent {
    ExecEvent { event: Some(event) }
}
