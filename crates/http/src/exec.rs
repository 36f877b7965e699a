//! Commands: collected into one answer, or streamed.
//!
//! Both hold the [`Session`]. When the client leaves, the handler (or the body it returned) is dropped, the session
//! with it, and that kills the command.

use super::{
    App,
    errors::Answer,
    extract::{self, LARGE, SandboxPath},
    responses::{Any, Guest, Named, Told},
    sse::{self, Decoder, Text},
};
use axum::{
    Json,
    extract::State,
    http::HeaderName,
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use keiki_api::{Error, ExecEvent, Result, Session};
use keiki_types::api::{ExecRequest, ExecResult};
use serde::Serialize;

/// What the buffered call keeps of each stream.
const KEPT: usize = 16 << 20;

/// Names a command that is running, in the answer that begins before its end.
pub(super) const EXEC: HeaderName = HeaderName::from_static("x-keiki-exec");

/// Runs a command and answers when it has ended.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "exec", operation_id = "exec",
    params(("id" = String, Path, description = "The sandbox")), request_body = ExecRequest,
    responses((status = 200, description = "It ended, with whatever exit code", body = ExecResult),
        Any, Told, Named, Guest))]
pub(super) async fn buffered(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<ExecRequest, LARGE>,
) -> Answer<Json<ExecResult>> {
    let limit = request.timeout_seconds;
    Ok(Json(collect(app.api.exec(id, request, None).await?, limit).await?))
}

/// Runs a command and streams what it sends: events `stdout` and `stderr` with `chunk` (and `base64` where that
/// was not UTF-8), at last `exit` with `exit_code`, or `error`.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec/stream", tag = "exec", operation_id = "exec_stream",
    params(("id" = String, Path, description = "The sandbox")), request_body = ExecRequest,
    responses((status = 200, description = "Its events", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        Any, Told, Named, Guest))]
pub(super) async fn stream(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<ExecRequest, LARGE>,
) -> Answer<Response> {
    let limit = request.timeout_seconds;
    let session = app.api.exec(id, request, None).await?;
    let name = [(EXEC, session.id.clone())];
    Ok((name, sse::response(frames(session, limit))).into_response())
}

fn timed_out(limit: Option<f64>) -> Error {
    Error::Timeout(
        limit.map_or("command timeout".into(), |seconds| format!("command timeout after {seconds}s")),
    )
}

fn lost() -> Error {
    let cause = anyhow::anyhow!("its events ended without an exit");
    Error::internal("the sandbox ended while the command ran", cause)
}

/// The beginning of a stream, and whether there was more.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    cut: bool,
}

impl Kept {
    fn push(&mut self, more: &[u8]) {
        let fits = more.len().min(KEPT - self.bytes.len());
        self.bytes.extend_from_slice(&more[..fits]);
        self.cut |= fits < more.len();
    }

    fn text(mut self) -> (String, Option<String>) {
        if self.cut {
            self.bytes.truncate(self.bytes.len() - sse::unfinished(&self.bytes));
        }
        let Text { text, exact } = Text::new(self.bytes);
        (text, exact.map(|exact| BASE64_STANDARD.encode(exact)))
    }
}

async fn collect(mut session: Session, limit: Option<f64>) -> Result<ExecResult> {
    let (mut out, mut err) = (Kept::default(), Kept::default());
    while let Some(event) = session.events.next().await {
        match event? {
            ExecEvent::Stdout { data, .. } => out.push(&data),
            ExecEvent::Stderr { data, .. } => err.push(&data),
            ExecEvent::Exit { timed_out: true, .. } => return Err(timed_out(limit)),
            ExecEvent::Exit { code, message, duration_ms, .. } => {
                err.push(reason(&message).as_bytes());
                let truncated = out.cut || err.cut;
                let ((stdout, stdout_base64), (stderr, stderr_base64)) = (out.text(), err.text());
                return Ok(ExecResult {
                    stdout,
                    stderr,
                    exit_code: code,
                    duration_ms,
                    truncated,
                    stdout_base64,
                    stderr_base64,
                });
            }
        }
    }
    Err(lost())
}

/// Why a command could not start, as a shell would have said it on standard error.
fn reason(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!("{message}\n") }
}

#[derive(Serialize)]
struct Chunk<'a> {
    chunk: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
}

#[derive(Serialize)]
struct Exit {
    exit_code: i32,
    duration_ms: u64,
}

/// One output stream of a command, as text.
struct Side {
    name: &'static str,
    decoder: Decoder,
    /// Bytes of the stream up to the end of what was sent.
    at: u64,
}

impl Side {
    fn new(name: &'static str, at: u64) -> Self {
        Self { name, decoder: Decoder::default(), at }
    }

    /// Chunks of what is whole: two where bytes are missing between.
    fn push(&mut self, offset: u64, data: &[u8]) -> Vec<(u64, Text)> {
        let mut chunks = Vec::new();
        if offset != self.at + self.decoder.held() as u64 {
            chunks.extend(self.finish());
            self.at = offset;
        }
        let (at, held) = (self.at, self.decoder.held());
        chunks.extend(self.decoder.push(data).map(|text| (at, text)));
        self.at += (held + data.len() - self.decoder.held()) as u64;
        chunks
    }

    /// What was held back.
    fn finish(&mut self) -> Option<(u64, Text)> {
        let at = self.at;
        self.at += self.decoder.held() as u64;
        self.decoder.finish().map(|text| (at, text))
    }
}

/// A session as frames of server-sent events.
struct Frames {
    session: Session,
    limit: Option<f64>,
    out: Side,
    err: Side,
    /// Chunks carry offsets and event ids, to go on from.
    resumable: bool,
    span: tracing::Span,
}

/// The frames of a command that was started with this time limit.
fn frames(session: Session, limit: Option<f64>) -> impl Stream<Item = Bytes> + Send + 'static {
    let (out, err) = (Side::new("stdout", 0), Side::new("stderr", 0));
    run(Frames { session, limit, out, err, resumable: false, span: tracing::Span::current() })
}

/// The frames of a command that can be read again from anywhere.
pub(super) fn resumable(session: Session) -> impl Stream<Item = Bytes> + Send + 'static {
    let [out, err] = session.offsets;
    let (out, err) = (Side::new("stdout", out), Side::new("stderr", err));
    run(Frames { session, limit: None, out, err, resumable: true, span: tracing::Span::current() })
}

fn run(frames: Frames) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold(Some(frames), |frames| async {
        let mut frames = frames?;
        let (frame, last) = frames.next().await;
        Some((frame, (!last).then_some(frames)))
    })
}

impl Frames {
    /// The next frame, and whether it is the last.
    async fn next(&mut self) -> (Bytes, bool) {
        loop {
            let Ok(event) = tokio::time::timeout(sse::PING_EVERY, self.session.events.next()).await else {
                return (sse::PING, false);
            };
            let text = match event {
                Some(Ok(ExecEvent::Stdout { offset, data })) => {
                    let chunks = self.out.push(offset, &data);
                    self.chunks(self.out.name, chunks)
                }
                Some(Ok(ExecEvent::Stderr { offset, data })) => {
                    let chunks = self.err.push(offset, &data);
                    self.chunks(self.err.name, chunks)
                }
                Some(Ok(ExecEvent::Exit { code, timed_out: false, message, duration_ms })) => {
                    return (self.exit(code, &message, duration_ms), true);
                }
                Some(Ok(ExecEvent::Exit { .. })) => return (self.failure(&timed_out(self.limit)), true),
                Some(Err(error)) => return (self.failure(&error), true),
                None => return (self.failure(&lost()), true),
            };
            if !text.is_empty() {
                return (text.into(), false);
            }
        }
    }

    fn chunks(&self, name: &str, chunks: impl IntoIterator<Item = (u64, Text)>) -> String {
        let frames = chunks.into_iter().map(|(at, Text { text, exact })| {
            let base64 = exact.map(|exact| BASE64_STANDARD.encode(exact));
            let frame =
                sse::event(name, &Chunk { chunk: &text, base64, offset: self.resumable.then_some(at) });
            // Where to go on after this frame, for a client that lost the stream.
            if self.resumable { format!("id: {}-{}\n{frame}", self.out.at, self.err.at) } else { frame }
        });
        frames.collect()
    }

    /// What was held back of both streams.
    fn rest(&mut self) -> String {
        let (out, err) = (self.out.finish(), self.err.finish());
        self.chunks("stdout", out) + &self.chunks("stderr", err)
    }

    fn exit(&mut self, exit_code: i32, message: &str, duration_ms: u64) -> Bytes {
        let mut frames = self.rest();
        if !message.is_empty() {
            let text = Text { text: reason(message), exact: None };
            frames += &self.chunks("stderr", [(self.err.at, text)]);
        }
        frames += &sse::event("exit", &Exit { exit_code, duration_ms });
        frames.into()
    }

    fn failure(&mut self, error: &Error) -> Bytes {
        let error = self.span.in_scope(|| sse::error(error));
        (self.rest() + &error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT, Kept, Side, Text, reason, timed_out};

    #[test]
    fn a_timeout_is_said_as_it_was_asked_for() {
        assert_eq!(timed_out(Some(5.0)).to_string(), "command timeout after 5s");
        assert_eq!(timed_out(Some(0.5)).to_string(), "command timeout after 0.5s");
        assert_eq!(reason(""), "");
    }

    #[test]
    fn offsets_tell_where_each_chunk_begins() {
        let mut side = Side::new("stdout", 10);
        let text = |text: &str| Text { text: text.into(), exact: None };
        assert_eq!(side.push(10, "ab".as_bytes()), [(10, text("ab"))]);
        assert_eq!(side.push(12, b"c\xc3"), [(12, text("c"))]);
        assert_eq!(side.at, 13, "what is held back comes again");
        assert_eq!(side.push(14, b"\xa9d"), [(13, text("éd"))]);
        assert_eq!(side.push(16, b"\xc3"), []);
        let chunks = side.push(100, b"x");
        assert_eq!(
            chunks.iter().map(|(at, _)| *at).collect::<Vec<_>>(),
            [16, 100],
            "bytes are missing between"
        );
        assert_eq!((side.at, side.finish()), (101, None));
    }

    #[test]
    fn a_long_stream_is_cut_between_characters() {
        let mut kept = Kept::default();
        kept.push(&vec![b'x'; KEPT - 1]);
        assert!(!kept.cut);
        kept.push("é".as_bytes());
        kept.push(b"more");
        assert!(kept.cut);
        let (text, exact) = kept.text();
        assert_eq!((text.len(), exact), (KEPT - 1, None));
    }
}
