//! Commands in a sandbox.
//!
//! A command is a session in the guest, which keeps its output ring. A pump task per listener
//! carries its events; if the connection breaks, the pump reattaches where it was. If the listener
//! goes away, it kills the command, except a background command ([`known`]).

pub mod known;
mod pump;

use crate::{error::Result, guest::refusal, sandbox::Use};
use bytes::Bytes;
use keiki_api::{Control, request};
use keiki_protocol::guest::{EnvVar, ExecSpec, InputChunk, Pty, ResizeRequest, SignalRequest};
use keiki_types::api::ExecRequest;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::OwnedSemaphorePermit;

/// Events between the guest and a slow listener; beyond that the guest waits.
const EVENTS_AHEAD: usize = 16;
/// One message of input.
const INPUT_CHUNK: usize = 64 << 10;

/// A session in a guest. The sandbox is in use as long as this is held.
struct InGuest {
    id: String,
    using: Use,
    /// Killed when its listener goes away.
    ends_with_caller: AtomicBool,
    _stream: OwnedSemaphorePermit,
}

impl InGuest {
    fn new(id: &str, using: Use, ends_with_caller: bool) -> Result<Self> {
        let stream = using.live.guest.stream()?;
        let ends_with_caller = AtomicBool::new(ends_with_caller);
        Ok(Self { id: id.into(), using, ends_with_caller, _stream: stream })
    }

    fn ends_with_caller(&self) -> bool {
        self.ends_with_caller.load(Ordering::Acquire)
    }

    /// `spool`: the guest keeps it until the command reads it, without making the caller wait.
    async fn send_input(&self, data: &Bytes, eof: bool, spool: bool) -> Result<()> {
        let chunk = |data, eof| InputChunk { id: self.id.clone(), data, eof, spool };
        let mut chunks: Vec<InputChunk> =
            data.chunks(INPUT_CHUNK).map(|part| chunk(data.slice_ref(part), false)).collect();
        if eof || chunks.is_empty() {
            chunks.push(chunk(Bytes::new(), eof));
        }
        let sent = self.using.live.guest.client().await.input(futures::stream::iter(chunks)).await;
        sent.map(drop).map_err(|status| refusal(&status))
    }
}

#[async_trait::async_trait]
impl Control for InGuest {
    async fn input(&self, data: Bytes, eof: bool) -> Result<()> {
        self.send_input(&data, eof, false).await
    }

    async fn signal(&self, signal: i32) -> Result<()> {
        let request = SignalRequest { id: self.id.clone(), signal, whole_group: true };
        let guest = &self.using.live.guest;
        let sent = guest.call(request, |mut guest, request| async move { guest.signal(request).await });
        sent.await.map(drop).map_err(|status| refusal(&status))
    }

    fn leave(&self) {
        self.ends_with_caller.store(false, Ordering::Release);
    }

    async fn resize(&self, cols: u32, rows: u32) -> Result<()> {
        let pty = Some(terminal(cols, rows)?);
        let request = ResizeRequest { id: self.id.clone(), pty };
        let guest = &self.using.live.guest;
        let sent = guest.call(request, |mut guest, request| async move { guest.resize(request).await });
        sent.await.map(drop).map_err(|status| refusal(&status))
    }
}

/// A request that can be carried out.
struct Checked {
    spec: ExecSpec,
    /// All its input, if it gets any.
    stdin: Option<Bytes>,
}

fn spec(request: ExecRequest, pty: Option<(u32, u32)>) -> Result<Checked> {
    request::check_command(&request)?;
    let timeout_ms = request::timeout_ms(request.timeout_seconds)?;
    let stdin = request::stdin(&request)?;
    let pty = pty.map(|(cols, rows)| terminal(cols, rows)).transpose()?;
    let spec = ExecSpec {
        id: uuid::Uuid::new_v4().to_string(),
        argv: request.argv.unwrap_or_default().into_iter().map(Bytes::from).collect(),
        shell: request.cmd.unwrap_or_default().into(),
        env: request
            .env
            .into_iter()
            .map(|(name, value)| EnvVar { name: name.into(), value: value.into() })
            .collect(),
        cwd: request.cwd.unwrap_or_default().into(),
        user: request.user.unwrap_or_default(),
        stdin_open: stdin.is_some() || pty.is_some(),
        timeout_ms,
        pty,
        keep: false,
    };
    Ok(Checked { spec, stdin })
}

fn terminal(cols: u32, rows: u32) -> Result<Pty> {
    request::terminal(cols, rows).map(|size| Pty { cols: size.cols, rows: size.rows })
}
