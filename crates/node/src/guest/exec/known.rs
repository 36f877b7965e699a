//! Commands by their ids: background commands, and commands whose caller detached.
//!
//! The node keeps no state for them. They are in the guest's memory, so a fork has its own copy of
//! each, and they survive a restart of the node and a hibernation.

use super::{
    Checked, EVENTS_AHEAD, InGuest,
    pump::{self, Pump, SIGKILL, START_LIMIT},
    spec,
};
use crate::{
    daemon::Node,
    error::{Error, Result},
    guest::link::{plain, refusal, within},
    guest::upload,
    sandbox::Use,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use keiki_api::{ByteStream, Commands, Control, ReadFrom, Session, request, rfc3339};
use keiki_protocol::guest::{
    ExecInfo, ForgetRequest, InputChunk, ListExecsRequest, SignalRequest, exec_event::Event,
};
use keiki_types::{
    SandboxId,
    api::{
        ExecRequest,
        execs::{Exec, Signal, StartExec},
    },
};
use std::sync::Arc;
use time::OffsetDateTime;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

/// Words of a command line that are shown.
const SHOWN_WORDS: usize = 256;

#[async_trait]
impl Commands for Node {
    async fn exec(&self, id: SandboxId, request: ExecRequest, pty: Option<(u32, u32)>) -> Result<Session> {
        let Checked { mut spec, stdin } = spec(request, pty)?;
        // A caller may detach from a terminal and reattach.
        spec.keep = pty.is_some();
        let session = Arc::new(InGuest::new(&spec.id, self.inner.begin(id).await?, true)?);
        let (tell, started) = oneshot::channel();
        let (pump, session) = read(session, [0, 0]);
        // In a separate task: a caller that disconnects before the guest has answered must not
        // leave the command behind.
        tokio::spawn(pump.begin(spec, stdin, tell));
        started.await.map_err(|cause| Error::internal("the command was cancelled", cause))??;
        Ok(session)
    }

    async fn start_exec(&self, id: SandboxId, request: StartExec) -> Result<Exec> {
        let StartExec { command, stdin_open, pty } = request;
        let mut checked = spec(command, pty.map(|size| (size.cols, size.rows)))?;
        let all = checked.stdin.take();
        checked.spec.keep = true;
        checked.spec.stdin_open |= stdin_open;
        let session = Arc::new(InGuest::new(&checked.spec.id, self.inner.begin(id).await?, false)?);
        // In a separate task: a caller that disconnects must not leave it half done.
        let started = tokio::spawn(async move {
            let mut events = pump::start(&session, checked.spec).await?;
            let first = within(START_LIMIT, async { events.message().await }).await;
            let first = first.map_err(|status| refusal(&status))?.and_then(|event| event.event);
            if let Some(Event::Exit(exit)) = first {
                return Err(Error::Invalid(plain(&exit.message)));
            }
            drop(events);
            if let Some(stdin) = all {
                // The guest keeps it: a command that never reads its input must not keep its
                // sandbox in use.
                let spooled =
                    tokio::time::timeout(START_LIMIT, session.send_input(&stdin, !stdin_open, true));
                let spooled =
                    spooled.await.map_err(|late| Error::internal("the guest did not accept the input", late));
                // One without open input has ended already.
                if let Err(error @ (Error::Internal { .. } | Error::NoRoom(_))) =
                    spooled.and_then(|sent| sent)
                {
                    let _ = session.signal(SIGKILL).await;
                    return Err(session.using.explain(error).await);
                }
            }
            get(&session.using, &session.id).await
        });
        started.await.map_err(|cause| Error::internal("the command was cancelled", cause))?
    }

    async fn execs(&self, id: SandboxId) -> Result<Vec<Exec>> {
        list(&self.inner.begin(id).await?).await
    }

    async fn get_exec(&self, id: SandboxId, exec: &str) -> Result<Exec> {
        get(&self.inner.begin(id).await?, exec).await
    }

    async fn attach_exec(&self, id: SandboxId, exec: &str, from: ReadFrom) -> Result<Session> {
        let session = Arc::new(InGuest::new(exec, self.inner.begin(id).await?, false)?);
        let offsets = match from {
            ReadFrom::Offsets(offsets) => offsets,
            ReadFrom::Tail(bytes) => {
                let exec = get(&session.using, exec).await?;
                [exec.stdout_bytes, exec.stderr_bytes].map(|end| end.saturating_sub(bytes))
            }
        };
        let request = pump::attach(exec, offsets, true);
        let using = &session.using;
        let stream = using.call(request, |mut guest, request| async move { guest.attach(request).await });
        let stream = stream.await?;
        let (pump, session) = read(session, offsets);
        tokio::spawn(pump.run(stream));
        Ok(session)
    }

    async fn signal_exec(&self, id: SandboxId, exec: &str, signal: Signal) -> Result<()> {
        let signal = request::signal(&signal)?;
        let request = SignalRequest { id: exec.into(), signal, whole_group: true };
        self.ask(id, request, |mut guest, request| async move { guest.signal(request).await }).await.map(drop)
    }

    async fn write_exec(&self, id: SandboxId, exec: &str, data: ByteStream, eof: bool) -> Result<u64> {
        let using = self.inner.begin(id).await?;
        let _stream = using.live.guest.stream()?;
        let name = exec.to_owned();
        let chunk = move |piece: Option<Bytes>| InputChunk {
            id: name.clone(),
            eof: eof && piece.is_none(),
            data: piece.unwrap_or_default(),
            spool: false,
        };
        let (chunks, broken) = upload::messages(data, chunk);
        let answer = using.live.guest.client().await.input(chunks).await;
        Ok(upload::finish(&using, broken, answer).await?.accepted)
    }

    async fn remove_exec(&self, id: SandboxId, exec: &str) -> Result<()> {
        let request = ForgetRequest { id: exec.into() };
        self.ask(id, request, |mut guest, request| async move { guest.forget(request).await }).await.map(drop)
    }
}

/// What carries a session's events, and what its reader gets.
fn read(session: Arc<InGuest>, offsets: [u64; 2]) -> (Pump, Session) {
    let (send, events) = mpsc::channel(EVENTS_AHEAD);
    let control = Arc::clone(&session) as Arc<dyn Control>;
    let id = session.id.clone();
    let events = ReceiverStream::new(events).boxed();
    (Pump { session, send, offsets }, Session { id, offsets, events, control })
}

async fn list(using: &Use) -> Result<Vec<Exec>> {
    let listed =
        using.call(ListExecsRequest {}, |mut guest, request| async move { guest.list_execs(request).await });
    Ok(listed.await?.execs.into_iter().map(view).collect())
}

async fn get(using: &Use, exec: &str) -> Result<Exec> {
    let found = list(using).await?.into_iter().find(|found| found.id == exec);
    found.ok_or_else(|| Error::NotFound(format!("no command {exec:?} in this sandbox")))
}

/// What a guest reports about a command, as the API shows it.
fn view(info: ExecInfo) -> Exec {
    let nanos = i128::from(info.started_unix_ms) * 1_000_000;
    let started = OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let words = info.argv.iter().take(SHOWN_WORDS).map(|word| String::from_utf8_lossy(word).into_owned());
    Exec {
        id: plain(&info.id),
        status: if info.exit.is_some() { "exited" } else { "running" }.into(),
        argv: words.collect(),
        pid: info.pid,
        started_at: rfc3339(started),
        pty: info.pty,
        background: info.keep,
        attached: info.attached,
        stdout_bytes: info.stdout_bytes,
        stderr_bytes: info.stderr_bytes,
        timed_out: info.exit.as_ref().is_some_and(|exit| exit.timed_out),
        exit_code: info.exit.as_ref().map(|exit| exit.code),
        duration_ms: info.exit.as_ref().map(|exit| exit.duration_ms),
    }
}
