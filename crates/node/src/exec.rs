//! Commands in a sandbox.
//!
//! A command is a session in the guest with its output ring there. A pump task per command carries events to
//! whoever listens; if the connection breaks it attaches again where it was, and if the listener goes away it
//! kills the command.

use crate::{
    error::{Error, Result},
    guest::{is_broken, plain, refusal, within},
    node::{
        Node,
        request::{self, Command},
    },
    sandbox::Use,
};
use base64::Engine as _;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use keiki_protocol::guest::{
    AttachRequest, EnvVar, ExecEvent as GuestEvent, ExecSpec, InputChunk, Pty, ResizeRequest, SignalRequest,
    exec_event::Event,
};
use keiki_types::{SandboxId, api::ExecRequest};
use std::{sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// Events between the guest and a slow listener; beyond that the guest waits.
const EVENTS_AHEAD: usize = 16;
/// One message of input.
const INPUT_CHUNK: usize = 64 << 10;
/// How often a session is found again after a broken connection, in a row.
const REATTACH: usize = 3;
/// The guest must say within this that a command has begun; what it then sends comes when it comes.
const START_LIMIT: Duration = Duration::from_secs(60);
const SIGKILL: i32 = 9;

/// What a running command sends, in order. `Exit` is last; a stream that ends without it lost its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// Bytes of standard output (with a pty: all output).
    Stdout(Bytes),
    /// Bytes of standard error.
    Stderr(Bytes),
    /// The end.
    Exit {
        /// As a shell reports it.
        code: i32,
        /// Killed because its time was up.
        timed_out: bool,
        /// Why it could not start, else empty.
        message: String,
        /// Run time in ms.
        duration_ms: u64,
    },
}

/// A started command. Dropping `events` kills the command's whole cgroup, unless it has exited.
pub struct Session {
    /// What it sends.
    pub events: BoxStream<'static, Result<ExecEvent>>,
    /// The way back in.
    pub control: Control,
}

/// Input and signals of a command. Cheap to clone.
#[derive(Clone)]
pub struct Control {
    pub(crate) inner: Arc<dyn ControlInner>,
}

/// How a [`Control`] reaches its command.
#[async_trait::async_trait]
pub(crate) trait ControlInner: Send + Sync {
    async fn input(&self, data: Bytes, eof: bool) -> Result<()>;
    async fn signal(&self, signal: i32) -> Result<()>;
    async fn resize(&self, cols: u32, rows: u32) -> Result<()>;
}

impl Control {
    /// Sends bytes to standard input, or ends it. Returns when the guest has taken them.
    ///
    /// # Errors
    /// If the command or the machine has ended.
    pub async fn input(&self, data: Bytes, eof: bool) -> Result<()> {
        self.inner.input(data, eof).await
    }

    /// Sends a signal to every process of the command.
    ///
    /// # Errors
    /// If the command or the machine has ended.
    pub async fn signal(&self, signal: i32) -> Result<()> {
        self.inner.signal(signal).await
    }

    /// Tells the terminal its size.
    ///
    /// # Errors
    /// If the command or the machine has ended.
    pub async fn resize(&self, cols: u32, rows: u32) -> Result<()> {
        self.inner.resize(cols, rows).await
    }
}

/// A session in a guest. The sandbox is in use as long as this is held.
struct InGuest {
    id: String,
    using: Use,
    _stream: OwnedSemaphorePermit,
}

#[async_trait::async_trait]
impl ControlInner for InGuest {
    async fn input(&self, data: Bytes, eof: bool) -> Result<()> {
        let chunk = |data, eof| InputChunk { id: self.id.clone(), data, eof };
        let mut chunks: Vec<InputChunk> =
            data.chunks(INPUT_CHUNK).map(|part| chunk(data.slice_ref(part), false)).collect();
        if eof || chunks.is_empty() {
            chunks.push(chunk(Bytes::new(), eof));
        }
        let sent = self.using.live.guest.client().await.input(futures::stream::iter(chunks)).await;
        sent.map(drop).map_err(|status| refusal(&status))
    }

    async fn signal(&self, signal: i32) -> Result<()> {
        let request = SignalRequest { id: self.id.clone(), signal, whole_group: true };
        let sent = self.using.live.guest.call(|mut guest| {
            let request = request.clone();
            async move { guest.signal(request).await }
        });
        sent.await.map(drop).map_err(|status| refusal(&status))
    }

    async fn resize(&self, cols: u32, rows: u32) -> Result<()> {
        let request = ResizeRequest { id: self.id.clone(), pty: Some(Pty { cols, rows }) };
        let sent = self.using.live.guest.call(|mut guest| {
            let request = request.clone();
            async move { guest.resize(request).await }
        });
        sent.await.map(drop).map_err(|status| refusal(&status))
    }
}

impl Node {
    /// Starts a command. `pty`: columns and rows.
    ///
    /// # Errors
    /// 400, 404, 409.
    pub async fn exec(
        &self,
        id: SandboxId,
        request: ExecRequest,
        pty: Option<(u32, u32)>,
    ) -> Result<Session> {
        let command = request::command(&request)?;
        let timeout_ms = request::timeout_ms(request.timeout_seconds)?;
        let stdin = stdin(&request)?;
        let spec = spec(request, command, timeout_ms, stdin.is_some(), pty);
        let using = self.inner.begin(id).await?;
        let stream = using.live.guest.stream()?;
        let session = Arc::new(InGuest { id: spec.id.clone(), using, _stream: stream });
        let (send, events) = mpsc::channel(EVENTS_AHEAD);
        let (tell, started) = oneshot::channel();
        let control = Control { inner: Arc::clone(&session) as Arc<dyn ControlInner> };
        // On its own: a caller who leaves before the guest has answered must not leave the command behind.
        tokio::spawn(Pump { session, send, stdout: 0, stderr: 0 }.begin(spec, stdin, tell));
        started.await.map_err(|cause| Error::internal("the command was given up", cause))??;
        Ok(Session { events: ReceiverStream::new(events).boxed(), control })
    }
}

fn stdin(request: &ExecRequest) -> Result<Option<Bytes>> {
    match (&request.stdin, &request.stdin_base64) {
        (Some(_), Some(_)) => Err(Error::Invalid("give stdin or stdin_base64, not both".into())),
        (Some(text), None) => Ok(Some(text.clone().into())),
        (None, Some(coded)) => match base64::engine::general_purpose::STANDARD.decode(coded) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) => Err(Error::Invalid(format!("stdin_base64 is not base64: {error}"))),
        },
        (None, None) => Ok(None),
    }
}

fn spec(
    request: ExecRequest,
    command: Command,
    timeout_ms: u64,
    has_stdin: bool,
    pty: Option<(u32, u32)>,
) -> ExecSpec {
    let (argv, shell) = match command {
        Command::Shell(line) => (Vec::new(), line),
        Command::Argv(argv) => (argv, String::new()),
    };
    ExecSpec {
        id: uuid::Uuid::new_v4().to_string(),
        argv: argv.into_iter().map(Bytes::from).collect(),
        shell: shell.into(),
        env: request
            .env
            .into_iter()
            .map(|(name, value)| EnvVar { name: name.into(), value: value.into() })
            .collect(),
        cwd: request.cwd.unwrap_or_default().into(),
        user: request.user.unwrap_or_default(),
        stdin_open: has_stdin || pty.is_some(),
        timeout_ms,
        pty: pty.map(|(cols, rows)| Pty { cols, rows }),
    }
}

/// Starts the session; if the connection turns out to be broken, over a new one.
async fn start(session: &InGuest, spec: ExecSpec) -> Result<Streaming<GuestEvent>> {
    match try_start(session, spec).await {
        Ok(events) => Ok(events),
        Err(error) => Err(session.using.explain(error).await),
    }
}

async fn try_start(session: &InGuest, spec: ExecSpec) -> Result<Streaming<GuestEvent>> {
    let guest = &session.using.live.guest;
    let first = within(START_LIMIT, guest.client().await.exec(spec.clone())).await;
    let answer = match first {
        Err(status) if is_broken(&status) => {
            let mut client = guest.reconnect().await?;
            match within(START_LIMIT, client.exec(spec)).await {
                // The first one had arrived after all.
                Err(status) if status.code() == tonic::Code::AlreadyExists => {
                    within(START_LIMIT, client.attach(attach(&session.id, 0, 0))).await
                }
                answer => answer,
            }
        }
        answer => answer,
    };
    answer.map(tonic::Response::into_inner).map_err(|status| refusal(&status))
}

fn attach(id: &str, stdout_offset: u64, stderr_offset: u64) -> AttachRequest {
    AttachRequest { id: id.into(), stdout_offset, stderr_offset }
}

/// Carries the events of one command.
struct Pump {
    session: Arc<InGuest>,
    send: mpsc::Sender<Result<ExecEvent>>,
    stdout: u64,
    stderr: u64,
}

/// What came out of one connection's stream.
enum Outcome {
    Exited,
    Unheard,
    Broken(Status),
}

impl Pump {
    /// Starts the command, says so, and carries its events.
    async fn begin(self, spec: ExecSpec, stdin: Option<Bytes>, tell: oneshot::Sender<Result<()>>) {
        let left = async {
            self.send.closed().await;
            tokio::time::sleep(START_LIMIT).await;
        };
        let started = tokio::select! {
            started = start(&self.session, spec) => started,
            () = left => {
                let _ = self.session.signal(SIGKILL).await;
                return;
            }
        };
        match started {
            Ok(stream) => {
                if let Some(stdin) = stdin {
                    let session = Arc::clone(&self.session);
                    // A command that does not read its input is no error of the exec.
                    tokio::spawn(async move { session.input(stdin, true).await });
                }
                // Where nobody listens any more the first look at the events kills the command.
                let _ = tell.send(Ok(()));
                self.run(stream).await;
            }
            Err(error) => drop(tell.send(Err(error))),
        }
    }

    async fn run(mut self, mut stream: Streaming<GuestEvent>) {
        let mut failures = 0;
        loop {
            let before = (self.stdout, self.stderr);
            match self.carry(&mut stream).await {
                Outcome::Exited => return,
                Outcome::Unheard => {
                    // Nobody listens any more: the command ends with its caller.
                    let _ = self.session.signal(SIGKILL).await;
                    return;
                }
                Outcome::Broken(status) => {
                    failures = if (self.stdout, self.stderr) != before { 1 } else { failures + 1 };
                    match self.again(failures).await {
                        Some(next) => stream = next,
                        None => {
                            let error = self.session.using.explain(lost(&status)).await;
                            let _ = self.send.send(Err(error)).await;
                            return;
                        }
                    }
                }
            }
        }
    }

    async fn carry(&mut self, stream: &mut Streaming<GuestEvent>) -> Outcome {
        loop {
            let next = tokio::select! {
                next = stream.message() => next,
                () = self.send.closed() => return Outcome::Unheard,
            };
            let event = match next {
                Ok(Some(event)) => event.event,
                Ok(None) => return Outcome::Broken(Status::unavailable("the stream ended early")),
                Err(status) => return Outcome::Broken(status),
            };
            let (event, last) = match event {
                None | Some(Event::Started(_)) => continue,
                Some(Event::Stdout(output)) => {
                    match after(self.stdout, output.offset, output.data.len()) {
                        Some(next) => self.stdout = next,
                        None => return Outcome::Broken(backwards()),
                    }
                    (ExecEvent::Stdout(output.data), false)
                }
                Some(Event::Stderr(output)) => {
                    match after(self.stderr, output.offset, output.data.len()) {
                        Some(next) => self.stderr = next,
                        None => return Outcome::Broken(backwards()),
                    }
                    (ExecEvent::Stderr(output.data), false)
                }
                Some(Event::Exit(exit)) => {
                    let (code, timed_out, duration_ms) = (exit.code, exit.timed_out, exit.duration_ms);
                    (ExecEvent::Exit { code, timed_out, message: plain(&exit.message), duration_ms }, true)
                }
            };
            if self.send.send(Ok(event)).await.is_err() && !last {
                return Outcome::Unheard;
            }
            if last {
                return Outcome::Exited;
            }
        }
    }

    /// The session over a new connection, unless the machine is gone.
    async fn again(&self, failures: usize) -> Option<Streaming<GuestEvent>> {
        let live = &self.session.using.live;
        if failures > REATTACH {
            return None;
        }
        let connected = tokio::select! {
            client = live.guest.reconnect() => client.ok()?,
            _ = live.machine.ended() => return None,
        };
        let mut client = connected;
        let attach = attach(&self.session.id, self.stdout, self.stderr);
        let answer = within(START_LIMIT, client.attach(attach)).await;
        answer.ok().map(tonic::Response::into_inner)
    }
}

/// Where a stream stands after a piece of it. None if the guest says what cannot be.
fn after(now: u64, offset: u64, len: usize) -> Option<u64> {
    if offset < now {
        return None;
    }
    offset.checked_add(len as u64)
}

fn backwards() -> Status {
    Status::data_loss("the guest's agent sent output out of order")
}

fn lost(status: &Status) -> Error {
    Error::internal("the sandbox ended while the command ran", anyhow::Error::new(status.clone()))
}

#[cfg(test)]
mod tests {
    use super::after;

    #[test]
    fn offsets_go_forward_and_never_over() {
        assert_eq!(after(0, 0, 5), Some(5));
        assert_eq!(after(5, 9, 1), Some(10), "what fell out of the guest's ring is skipped");
        assert_eq!(after(5, 4, 1), None);
        assert_eq!(after(5, u64::MAX, 1), None);
    }
}
