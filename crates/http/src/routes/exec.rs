//! Commands that end with their caller: collected into one answer, or streamed.
//!
//! Both hold the [`Session`]. When the client disconnects, the handler (or the body it returned) is
//! dropped, the session with it, and that kills the command.

use crate::{
    App,
    errors::Answer,
    extract::{self, LARGE, SandboxPath},
    responses::{AuthErrors, BodyErrors, GuestErrors, NotFound},
    sse::{self, Decoder, Text},
};
use axum::{
    Json,
    extract::State,
    http::HeaderName,
    response::{IntoResponse, Response, sse::Event},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures::{Stream, StreamExt, stream};
use keiki_api::{Error, ExecEvent, Result, Session};
use keiki_types::api::{ExecRequest, ExecResult};
use serde::Serialize;

/// Bytes of each stream that the buffered call keeps.
const KEPT: usize = 16 << 20;

/// The id of the command, in an answer that starts before the command ends.
pub(super) const EXEC: HeaderName = HeaderName::from_static("x-keiki-exec");

/// Run a command and respond when it has exited.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "exec", operation_id = "exec",
    params(("id" = String, Path, description = "The sandbox")), request_body = ExecRequest,
    responses((status = 200, description = "The command exited, with any exit code", body = ExecResult),
        AuthErrors, BodyErrors, NotFound, GuestErrors))]
pub(super) async fn buffered(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<ExecRequest, LARGE>,
) -> Answer<Json<ExecResult>> {
    let limit = request.timeout_seconds;
    Ok(Json(collect(app.api.exec(id, request, None).await?, limit).await?))
}

/// Run a command and stream its output: events `stdout` and `stderr` with `chunk` (and `base64` where the bytes are not
/// UTF-8), then `exit` with `exit_code`, or `error`.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec/stream", tag = "exec", operation_id = "exec_stream",
    params(("id" = String, Path, description = "The sandbox")), request_body = ExecRequest,
    responses((status = 200, description = "Events of the command", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        AuthErrors, BodyErrors, NotFound, GuestErrors))]
pub(super) async fn stream(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<ExecRequest, LARGE>,
) -> Answer<Response> {
    let limit = request.timeout_seconds;
    let session = app.api.exec(id, request, None).await?;
    let name = [(EXEC, session.id.clone())];
    Ok((name, sse::response(events(session, limit, false))).into_response())
}

fn timed_out(limit: Option<f64>) -> Error {
    Error::Timeout(
        limit.map_or("command timeout".into(), |seconds| format!("command timeout after {seconds}s")),
    )
}

/// The error of a command whose machine is gone.
pub(super) fn lost() -> Error {
    let cause = anyhow::anyhow!("its events ended before an exit");
    Error::internal("the sandbox ended while the command ran", cause)
}

/// The beginning of a stream, and whether the rest was cut.
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

/// Why a command could not start, as a shell prints it to standard error.
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
    /// Position in the stream after the last chunk sent.
    at: u64,
}

impl Side {
    fn new(name: &'static str, at: u64) -> Self {
        Self { name, decoder: Decoder::default(), at }
    }

    /// Chunks of complete characters: two where bytes are missing in between.
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

    /// The incomplete character held back.
    fn finish(&mut self) -> Option<(u64, Text)> {
        let at = self.at;
        self.at += self.decoder.held() as u64;
        self.decoder.finish().map(|text| (at, text))
    }
}

/// A session as server-sent events.
struct Events {
    session: Session,
    limit: Option<f64>,
    out: Side,
    err: Side,
    /// Chunks carry offsets and event ids, so that a client can resume.
    resumable: bool,
    span: tracing::Span,
}

/// The events of a command. `limit`: its time limit.
pub(super) fn events(
    session: Session,
    limit: Option<f64>,
    resumable: bool,
) -> impl Stream<Item = Event> + Send + 'static {
    let [out, err] = session.offsets;
    let (out, err) = (Side::new("stdout", out), Side::new("stderr", err));
    let events = Events { session, limit, out, err, resumable, span: tracing::Span::current() };
    let all = stream::unfold(Some(events), |events| async {
        let mut events = events?;
        let (next, last) = events.next().await;
        Some((stream::iter(next), (!last).then_some(events)))
    });
    all.flatten()
}

impl Events {
    /// The next events, and whether they are the last.
    async fn next(&mut self) -> (Vec<Event>, bool) {
        match self.session.events.next().await {
            Some(Ok(ExecEvent::Stdout { offset, data })) => {
                let chunks = self.out.push(offset, &data);
                (self.chunks(self.out.name, chunks), false)
            }
            Some(Ok(ExecEvent::Stderr { offset, data })) => {
                let chunks = self.err.push(offset, &data);
                (self.chunks(self.err.name, chunks), false)
            }
            Some(Ok(ExecEvent::Exit { code, timed_out: false, message, duration_ms })) => {
                (self.exit(code, &message, duration_ms), true)
            }
            Some(Ok(ExecEvent::Exit { .. })) => (self.failure(&timed_out(self.limit)), true),
            Some(Err(error)) => (self.failure(&error), true),
            None => (self.failure(&lost()), true),
        }
    }

    fn chunks(&self, name: &str, chunks: impl IntoIterator<Item = (u64, Text)>) -> Vec<Event> {
        let events = chunks.into_iter().map(|(at, Text { text, exact })| {
            let base64 = exact.map(|exact| BASE64_STANDARD.encode(exact));
            // Where to resume after this event, for a client that lost the stream.
            let id = self.resumable.then(|| format!("{}-{}", self.out.at, self.err.at));
            sse::numbered(id, name, &Chunk { chunk: &text, base64, offset: self.resumable.then_some(at) })
        });
        events.collect()
    }

    /// What both streams held back.
    fn rest(&mut self) -> Vec<Event> {
        let (out, err) = (self.out.finish(), self.err.finish());
        [self.chunks("stdout", out), self.chunks("stderr", err)].concat()
    }

    fn exit(&mut self, exit_code: i32, message: &str, duration_ms: u64) -> Vec<Event> {
        let mut events = self.rest();
        if !message.is_empty() {
            let text = Text { text: reason(message), exact: None };
            events.extend(self.chunks("stderr", [(self.err.at, text)]));
        }
        events.push(sse::event("exit", &Exit { exit_code, duration_ms }));
        events
    }

    fn failure(&mut self, error: &Error) -> Vec<Event> {
        let mut events = self.rest();
        events.push(self.span.in_scope(|| sse::error(error)));
        events
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
