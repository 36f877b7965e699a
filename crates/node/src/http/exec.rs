//! Commands: collected into one answer, or streamed.
//!
//! Both hold the [`Session`]. When the client leaves, the handler (or the body it returned) is dropped, the session
//! with it, and that kills the command.

use super::{
    App,
    document::{Any, Guest, Named, Told},
    extract::{self, LARGE, OfSandbox},
    sse::{self, Decoder, Text},
};
use crate::{
    Error, Result,
    exec::{ExecEvent, Session},
};
use axum::{Json, extract::State, response::Response};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use keiki_types::api::{ExecRequest, ExecResult};
use serde::Serialize;
use std::time::Duration;

/// What the buffered call keeps of each stream.
const KEPT: usize = 16 << 20;

/// Runs a command and answers when it has ended.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "exec", operation_id = "exec",
    params(("id" = String, Path, description = "The sandbox")), request_body = ExecRequest,
    responses((status = 200, description = "It ended, with whatever exit code", body = ExecResult),
        Any, Told, Named, Guest))]
pub(super) async fn buffered(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    extract::Json(request): extract::Json<ExecRequest, LARGE>,
) -> Result<Json<ExecResult>> {
    check(&request)?;
    let limit = request.timeout_seconds;
    collect(app.api.exec(id, request, None).await?, limit).await.map(Json)
}

/// Runs a command and streams what it sends: events `stdout` and `stderr` with `chunk` (and `base64` where that
/// was not UTF-8), at last `exit` with `exit_code`, or `error`.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec/stream", tag = "exec", operation_id = "exec_stream",
    params(("id" = String, Path, description = "The sandbox")), request_body = ExecRequest,
    responses((status = 200, description = "Its events", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        Any, Told, Named, Guest))]
pub(super) async fn stream(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    extract::Json(request): extract::Json<ExecRequest, LARGE>,
) -> Result<Response> {
    check(&request)?;
    let limit = request.timeout_seconds;
    Ok(sse::response(frames(app.api.exec(id, request, None).await?, limit)))
}

/// Refuses what could not be run, naming the field.
pub(super) fn check(request: &ExecRequest) -> Result<()> {
    let invalid = |text: &str| Err(Error::Invalid(text.into()));
    match (&request.cmd, &request.argv) {
        (Some(_), None) => {}
        (None, Some(argv)) if argv.first().is_some_and(|program| !program.is_empty()) => {}
        (None, Some(_)) => return invalid("argv must begin with a program"),
        _ => return invalid("exactly one of cmd and argv must be given"),
    }
    if request.stdin.is_some() && request.stdin_base64.is_some() {
        return invalid("only one of stdin and stdin_base64 may be given");
    }
    if request.stdin_base64.as_ref().is_some_and(|text| BASE64_STANDARD.decode(text).is_err()) {
        return invalid("stdin_base64 is not base64");
    }
    let timely = |seconds: f64| seconds > 0.0 && Duration::try_from_secs_f64(seconds).is_ok();
    if request.timeout_seconds.is_some_and(|seconds| !timely(seconds)) {
        return invalid("timeout_seconds must be a number above 0");
    }
    if request.env.keys().any(|name| name.is_empty() || name.contains('=')) {
        return invalid("env: a name must not be empty and must not contain '='");
    }
    let nul = |text: &String| text.contains('\0');
    let fields = [
        ("cmd", request.cmd.as_ref().is_some_and(nul)),
        ("argv", request.argv.iter().flatten().any(nul)),
        ("env", request.env.iter().any(|(name, value)| nul(name) || nul(value))),
        ("cwd", request.cwd.as_ref().is_some_and(nul)),
        ("user", request.user.as_ref().is_some_and(nul)),
    ];
    match fields.iter().find(|(_, has_nul)| *has_nul) {
        Some((field, _)) => Err(Error::Invalid(format!("{field} contains a NUL"))),
        None => Ok(()),
    }
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
            ExecEvent::Stdout(bytes) => out.push(&bytes),
            ExecEvent::Stderr(bytes) => err.push(&bytes),
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
}

#[derive(Serialize)]
struct Exit {
    exit_code: i32,
    duration_ms: u64,
}

/// A session as frames of server-sent events.
struct Frames {
    session: Session,
    limit: Option<f64>,
    out: Decoder,
    err: Decoder,
    span: tracing::Span,
}

fn frames(session: Session, limit: Option<f64>) -> impl Stream<Item = Bytes> + Send + 'static {
    let (out, err) = (Decoder::default(), Decoder::default());
    let frames = Frames { session, limit, out, err, span: tracing::Span::current() };
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
                Some(Ok(ExecEvent::Stdout(bytes))) => self.out.push(&bytes).map(|text| chunk("stdout", text)),
                Some(Ok(ExecEvent::Stderr(bytes))) => self.err.push(&bytes).map(|text| chunk("stderr", text)),
                Some(Ok(ExecEvent::Exit { code, timed_out: false, message, duration_ms })) => {
                    return (self.exit(code, &message, duration_ms), true);
                }
                Some(Ok(ExecEvent::Exit { .. })) => return (self.failure(&timed_out(self.limit)), true),
                Some(Err(error)) => return (self.failure(&error), true),
                None => return (self.failure(&lost()), true),
            };
            if let Some(text) = text {
                return (text.into(), false);
            }
        }
    }

    /// What was held back of both streams.
    fn rest(&mut self) -> String {
        let out = self.out.finish().map(|text| chunk("stdout", text));
        let err = self.err.finish().map(|text| chunk("stderr", text));
        out.into_iter().chain(err).collect()
    }

    fn exit(&mut self, exit_code: i32, message: &str, duration_ms: u64) -> Bytes {
        let mut frames = self.rest();
        if !message.is_empty() {
            frames += &chunk("stderr", Text { text: reason(message), exact: None });
        }
        frames += &sse::event("exit", &Exit { exit_code, duration_ms });
        frames.into()
    }

    fn failure(&mut self, error: &Error) -> Bytes {
        let error = self.span.in_scope(|| sse::error(error));
        (self.rest() + &error).into()
    }
}

fn chunk(stream: &str, Text { text, exact }: Text) -> String {
    sse::event(stream, &Chunk { chunk: &text, base64: exact.map(|exact| BASE64_STANDARD.encode(exact)) })
}

#[cfg(test)]
mod tests {
    use super::{KEPT, Kept, check, reason, timed_out};
    use keiki_types::api::ExecRequest;

    #[test]
    fn what_could_not_be_run_is_refused_by_its_field() {
        let of = |json: &str| {
            let request: ExecRequest = serde_json::from_str(json).unwrap();
            check(&request).err().map(|error| error.to_string()).unwrap_or_default()
        };
        for good in [
            r#"{"cmd":""}"#,
            r#"{"argv":["true",""]}"#,
            r#"{"cmd":"x","timeout_seconds":0.5,"env":{"A":"="},"stdin":"\u0000"}"#,
            r#"{"cmd":"x","stdin_base64":"AA=="}"#,
        ] {
            assert_eq!(of(good), "", "{good}");
        }
        for (bad, named) in [
            ("{}", "cmd and argv"),
            (r#"{"cmd":"x","argv":["x"]}"#, "cmd and argv"),
            (r#"{"argv":[]}"#, "argv"),
            (r#"{"argv":[""]}"#, "argv"),
            (r#"{"cmd":"x","timeout_seconds":0}"#, "timeout_seconds"),
            (r#"{"cmd":"x","timeout_seconds":-1}"#, "timeout_seconds"),
            (r#"{"cmd":"x","timeout_seconds":1e300}"#, "timeout_seconds"),
            (r#"{"cmd":"x","stdin":"","stdin_base64":""}"#, "stdin"),
            (r#"{"cmd":"x","stdin_base64":"?"}"#, "stdin_base64"),
            (r#"{"cmd":"x","env":{"":"x"}}"#, "env"),
            (r#"{"cmd":"x","env":{"A=B":"x"}}"#, "env"),
            (r#"{"cmd":"a\u0000b"}"#, "cmd"),
            (r#"{"argv":["a","\u0000"]}"#, "argv"),
            (r#"{"cmd":"x","cwd":"\u0000"}"#, "cwd"),
        ] {
            assert!(of(bad).contains(named), "{bad}: {}", of(bad));
        }
    }

    #[test]
    fn a_timeout_is_said_as_it_was_asked_for() {
        assert_eq!(timed_out(Some(5.0)).to_string(), "command timeout after 5s");
        assert_eq!(timed_out(Some(0.5)).to_string(), "command timeout after 0.5s");
        assert_eq!(reason(""), "");
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
