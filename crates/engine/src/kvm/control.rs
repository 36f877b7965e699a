//! Our end of a monitor's control socket.

use crate::{EngineError, Result, process::blocking};
use keiki_control::{Answer, Client, ControlError, FailureKind, Hello, Reply, Request, Role};
use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// How long an answer may take that writes no file.
pub(super) const ANSWER: Duration = Duration::from_secs(30);
/// How long an answer may take that writes all of a guest's memory.
pub(super) const WRITE: Duration = Duration::from_secs(900);

/// Descriptors that go with a request. Ours are closed when the call is over.
pub(super) type Files = Vec<(Role, OwnedFd)>;

/// A connection. One request at a time; clones ask over the same.
#[derive(Clone)]
pub(super) struct Control {
    client: Arc<Mutex<Option<Client>>>,
    /// Where a machine listens. A connection that was lost is made again there.
    path: Option<PathBuf>,
}

impl Control {
    /// That of a blank, which stays that of the zygote it becomes. It ends with the last clone.
    pub(super) fn over(client: Client) -> Self {
        Self { client: Arc::new(Mutex::new(Some(client))), path: None }
    }

    /// That of the machine which listens at `path`.
    pub(super) fn at(path: PathBuf) -> Self {
        Self { client: Arc::default(), path: Some(path) }
    }

    /// Asks. A caller who goes away does not interrupt it.
    pub(super) async fn ask(&self, request: Request, files: Files, patience: Duration) -> Result<Answer> {
        let control = self.clone();
        blocking(move || control.ask_now(&request, &files, patience)).await
    }

    /// Asks what is only answered with [`Reply::Done`].
    pub(super) async fn order(&self, request: Request, files: Files) -> Result<()> {
        let name = request.name();
        match self.ask(request, files, ANSWER).await?.reply {
            Reply::Done => Ok(()),
            _ => Err(unexpected(name)),
        }
    }

    /// Asks for what a copy of the process does. The copy answers, on a connection of its own: others may ask meanwhile.
    pub(super) async fn ask_copy(&self, request: Request, mut files: Files) -> Result<Copy> {
        let (client, theirs) = Client::pair().map_err(failed)?;
        files.push((Role::Control, theirs));
        self.order(request, files).await?;
        Ok(Copy(client))
    }

    /// Who is there, and which process that is.
    pub(super) async fn hello(&self) -> Result<(Hello, u32)> {
        let Answer { reply, pid } = self.ask(Request::Hello, Files::new(), ANSWER).await?;
        match reply {
            Reply::Hello(hello) => Ok((hello, pid)),
            _ => Err(unexpected("Hello")),
        }
    }

    fn ask_now(&self, request: &Request, files: &Files, patience: Duration) -> Result<Answer> {
        let mut kept = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let mut client = match (kept.take(), &self.path) {
            (Some(client), _) => client,
            (None, Some(path)) => Client::connect(path).map_err(failed)?,
            (None, None) => return Err(failed(ControlError::Closed)),
        };
        let files: Vec<_> = files.iter().map(|(role, file)| (*role, file.as_fd())).collect();
        let answer = client.call(request, &files, patience);
        // After any other error an answer may still come that belongs to no later request.
        if matches!(answer, Ok(_) | Err(ControlError::Failed { .. })) {
            *kept = Some(client);
        }
        answer.map_err(failed)
    }
}

/// A copy that was asked for something.
pub(super) struct Copy(Client);

impl Copy {
    /// What it answers, also after another answer.
    pub(super) async fn answer(self, patience: Duration) -> Result<(Answer, Self)> {
        let Self(mut client) = self;
        blocking(move || Ok((client.answer(patience).map_err(failed)?, Self(client)))).await
    }
}

/// What the monitor or its socket said, as an engine says it.
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
        other => EngineError::Monitor(format!("cannot be talked to: {other}")),
    }
}

/// The answer belongs to no such request.
pub(super) fn unexpected(request: &'static str) -> EngineError {
    failed(ControlError::Unexpected { request })
}

/// Gives a failure the directory that it is about.
pub(super) fn about(dir: &std::path::Path) -> impl FnOnce(EngineError) -> EngineError {
    let dir = dir.to_owned();
    move |error| match error {
        EngineError::NoSpace(_) => EngineError::NoSpace(dir),
        EngineError::Refused { why, .. } => EngineError::Refused { dir, why },
        other => other,
    }
}

/// A sentence of a monitor, which is not to be believed: one short line.
fn plain(sentence: &str) -> String {
    sentence.chars().filter(|c| !c.is_control()).take(400).collect()
}
