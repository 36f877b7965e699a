//! Our end of a monitor's control socket.

use crate::{EngineError, Result, process::blocking};
use keiki_control::{Answer, Client, ControlError, FailureKind, Hello, Reply, Request, Role, Stage, Step};
use keiki_sys::stopwatch::Stopwatch;
use keiki_types::Shape;
use parking_lot::Mutex;
use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// How long an answer may take that writes no file.
pub(super) const ANSWER: Duration = Duration::from_secs(30);
/// How long an answer may take that writes all of a guest's memory.
pub(super) const WRITE: Duration = Duration::from_secs(900);
/// Most steps of one operation that are taken from a monitor.
const STEPS: usize = 24;

/// Descriptors that go with a request. Ours are closed after the call.
pub(super) type Files = Vec<(Role, OwnedFd)>;

/// A connection. One request at a time; clones share it.
#[derive(Clone)]
pub(super) struct Control {
    client: Arc<Mutex<Option<Client>>>,
    /// Where a machine listens: a lost connection is made again.
    path: Option<PathBuf>,
}

impl Control {
    /// The connection of a blank, which stays that of the zygote it becomes. It ends with the last clone.
    pub(super) fn over(client: Client) -> Self {
        Self { client: Arc::new(Mutex::new(Some(client))), path: None }
    }

    /// A connection to the machine that listens at `path`.
    pub(super) fn at(path: PathBuf) -> Self {
        Self { client: Arc::default(), path: Some(path) }
    }

    /// Sends a request and waits for the answer, even if the caller disconnects.
    pub(super) async fn ask(&self, request: Request, files: Files, patience: Duration) -> Result<Answer> {
        let control = self.clone();
        blocking(move || control.ask_now(&request, &files, patience)).await
    }

    /// Sends a request that is answered with [`Reply::Done`].
    pub(super) async fn order(&self, request: Request, files: Files) -> Result<()> {
        let name = request.name();
        match self.ask(request, files, ANSWER).await?.reply {
            Reply::Done => Ok(()),
            _ => Err(unexpected(name)),
        }
    }

    /// Sends a request that a copy of the process carries out. The copy answers on another connection, so this one is
    /// free meanwhile.
    pub(super) async fn ask_copy(&self, request: Request, mut files: Files) -> Result<Copy> {
        let (client, theirs) = Client::pair().map_err(failed)?;
        files.push((Role::Control, theirs));
        self.order(request, files).await?;
        Ok(Copy(client))
    }

    /// What the monitor is, and which process it is.
    pub(super) async fn hello(&self) -> Result<(Hello, u32)> {
        let Answer { reply, pid } = self.ask(Request::Hello, Files::new(), ANSWER).await?;
        match reply {
            Reply::Hello(hello) => Ok((hello, pid)),
            _ => Err(unexpected("Hello")),
        }
    }

    /// Whether the process of this number answers, and is at this stage.
    pub(super) async fn expect(&self, stage: Stage, process: u32) -> Result<Hello> {
        match self.hello().await? {
            (hello, pid) if hello.stage == stage && pid == process => Ok(hello),
            _ => Err(EngineError::Monitor(format!("of process {process} does not answer as {stage:?}"))),
        }
    }

    fn ask_now(&self, request: &Request, files: &Files, patience: Duration) -> Result<Answer> {
        let mut kept = self.client.lock();
        let mut client = match (kept.take(), &self.path) {
            (Some(client), _) => client,
            (None, Some(path)) => Client::connect(path).map_err(failed)?,
            (None, None) => return Err(failed(ControlError::Closed)),
        };
        let files: Vec<_> = files.iter().map(|(role, file)| (*role, file.as_fd())).collect();
        let answer = client.call(request, &files, patience);
        // After any other error the answer may still arrive, and would be mistaken for the answer
        // to a later request.
        if matches!(answer, Ok(_) | Err(ControlError::Failed { .. })) {
            *kept = Some(client);
        }
        answer.map_err(failed)
    }
}

/// A copy that carries out a request.
pub(super) struct Copy(Client);

impl Copy {
    /// Its next answer.
    pub(super) async fn answer(self, patience: Duration) -> Result<(Answer, Self)> {
        let Self(mut client) = self;
        blocking(move || Ok((client.answer(patience).map_err(failed)?, Self(client)))).await
    }
}

/// The error of an engine for a failed request.
pub(super) fn failed(error: ControlError) -> EngineError {
    match error {
        ControlError::Failed { kind: FailureKind::NoSpace, .. } => EngineError::NoSpace(PathBuf::new()),
        ControlError::Failed { kind: FailureKind::Refused, sentence } => {
            EngineError::Refused { dir: PathBuf::new(), why: plain(&sentence) }
        }
        ControlError::Failed { sentence, .. } => {
            EngineError::Monitor(format!("refused: {}", plain(&sentence)))
        }
        ControlError::Io(source) => EngineError::Io { what: "cannot talk to the monitor".into(), source },
        other => EngineError::Monitor(format!("cannot be reached: {other}")),
    }
}

/// The answer does not fit the request.
pub(super) fn unexpected(request: &'static str) -> EngineError {
    failed(ControlError::Unexpected { request })
}

/// Adds the directory to an error that is about it.
pub(super) fn about(dir: &Path) -> impl FnOnce(EngineError) -> EngineError {
    let dir = dir.to_owned();
    move |error| match error {
        EngineError::NoSpace(_) => EngineError::NoSpace(dir),
        EngineError::Refused { why, .. } => EngineError::Refused { dir, why },
        other => other,
    }
}

/// The shape as a request has it.
pub(super) fn shape(shape: Shape) -> keiki_control::Shape {
    keiki_control::Shape { vcpus: shape.vcpus.into(), memory_mib: shape.memory_mib }
}

/// A VM generation ID that no machine has had before.
pub(super) fn generation() -> [u8; 16] {
    uuid::Uuid::new_v4().into_bytes()
}

/// Adds the steps that a monitor reports: few, with short plain names, whatever it sends.
pub(super) fn note(watch: &mut Stopwatch, steps: &[Step]) {
    for step in steps.iter().take(STEPS) {
        let name: String =
            step.name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(24).collect();
        watch.note(format!("vmm_{name}"), Duration::from_nanos(step.ns));
    }
}

/// A message from a monitor, as one short line.
fn plain(sentence: &str) -> String {
    sentence.chars().filter(|c| !c.is_control()).take(400).collect()
}
