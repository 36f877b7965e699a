//! Logs: the guest's console, and what a template build says.

use super::{
    App,
    errors::Answer,
    extract::{self, BuildPath, Query, SandboxPath},
    responses::{Any, Asked, Named},
    sse,
};
use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use keiki_types::SandboxId;
use serde::Deserialize;
use std::{collections::VecDeque, time::Duration};
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};

/// How much of the console is shown.
const SHOWN: usize = 1 << 20;
/// How much of it is looked at again while it is followed.
const WATCHED: usize = 256 << 10;
/// How often that is.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A line is cut here, so that a console without line ends is sent too.
const LONGEST_LINE: usize = 16 << 10;
/// As much of the end of what was seen finds the place in what is seen next.
const ANCHOR: usize = 512;
/// A build's log that says nothing for so long has no more for now.
const QUIET: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Which {
    #[default]
    Both,
    Stdout,
    Stderr,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct LogsQuery {
    /// The console is on `stdout`; `stderr` is empty.
    #[serde(default)]
    #[param(inline, required = false)]
    stream: Which,
    /// Go on with what comes, as server-sent events `{"line": "…"}`.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    follow: bool,
}

/// The guest's console.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", tag = "sandboxes", operation_id = "console",
    params(("id" = String, Path, description = "The sandbox"), LogsQuery),
    responses((status = 200, description = "Its end; or events, with `follow`", content(
            (String = "text/plain"), (sse::ServerSentEvent = "text/event-stream"))),
        Any, Asked, Named))]
pub(super) async fn console(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(LogsQuery { stream, follow }): Query<LogsQuery>,
) -> Answer<Response> {
    let shown = app.api.console(id, if follow { WATCHED } else { SHOWN }).await?;
    let shown = if stream == Which::Stderr { Bytes::new() } else { shown };
    if !follow {
        let text = String::from_utf8_lossy(&shown).into_owned();
        return Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response());
    }
    let closing = app.closing.clone().cancelled_owned();
    if stream == Which::Stderr {
        return Ok(sse::response(stream::empty()));
    }
    Ok(sse::response(followed(app, id, shown).take_until(Box::pin(closing))))
}

/// A console that is followed. The node shows its end; what is new in it is found by where the end seen last is.
#[derive(Default)]
struct Tail {
    seen: Bytes,
    partial: Vec<u8>,
    lines: VecDeque<Bytes>,
}

#[derive(serde::Serialize)]
struct Line<'a> {
    line: &'a str,
}

impl Tail {
    fn look(&mut self, shown: Bytes) {
        for byte in &shown[new_from(&self.seen, &shown)..] {
            match byte {
                b'\n' => self.end_line(),
                _ => self.partial.push(*byte),
            }
            if self.partial.len() >= LONGEST_LINE {
                self.end_line();
            }
        }
        self.seen = shown;
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.partial);
        let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(&line));
        let frame = format!("data: {}\n\n", sse::ascii_json(&Line { line: &line }));
        self.lines.push_back(frame.into());
    }
}

/// Where in `shown` the part begins that was not in `seen`.
fn new_from(seen: &[u8], shown: &[u8]) -> usize {
    if shown.starts_with(seen) {
        return seen.len();
    }
    let anchor = &seen[seen.len().saturating_sub(ANCHOR)..];
    // Without a trace of what was seen, more came than is shown, or the machine is another one now.
    (0..=shown.len().saturating_sub(anchor.len()))
        .rev()
        .find(|at| shown[*at..].starts_with(anchor))
        .map_or(0, |at| at + anchor.len())
}

fn followed(app: App, id: SandboxId, shown: Bytes) -> impl Stream<Item = Bytes> + Send {
    let mut tail = Tail::default();
    tail.look(shown);
    stream::unfold((app, tail, Instant::now()), move |(app, mut tail, mut sent)| async move {
        loop {
            if let Some(line) = tail.lines.pop_front() {
                return Some((line, (app, tail, Instant::now())));
            }
            if sent.elapsed() >= sse::PING_EVERY {
                sent = Instant::now();
                return Some((sse::PING, (app, tail, sent)));
            }
            tokio::time::sleep(LOOK_EVERY).await;
            // The sandbox is gone, and with it its console.
            tail.look(app.api.console(id, WATCHED).await.ok()?);
        }
    })
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct BuildQuery {
    /// Go on until the build ends.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    follow: bool,
}

/// What a build says: one event a line, then `end`.
#[utoipa::path(get, path = "/v1/templates/builds/{id}/logs", tag = "templates", operation_id = "build_logs",
    params(("id" = String, Path, description = "The build"), BuildQuery),
    responses((status = 200, description = "Its lines", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        Any, Asked, Named))]
pub(super) async fn build(
    State(app): State<App>,
    BuildPath(id): BuildPath,
    Query(BuildQuery { follow }): Query<BuildQuery>,
) -> Answer<Response> {
    let lines = app.api.build_log(&id).await?;
    let wait = if follow { sse::PING_EVERY } else { QUIET };
    let frames = stream::unfold(Some(lines), move |lines| async move {
        let mut lines = lines?;
        match tokio::time::timeout(wait, lines.next()).await {
            Ok(Some(line)) => Some((log_line(&line), Some(lines))),
            Err(_) if follow => Some((sse::PING, Some(lines))),
            Ok(None) | Err(_) => Some((Bytes::from_static(b"data: end\n\n"), None)),
        }
    });
    Ok(sse::response(frames.take_until(Box::pin(app.closing.clone().cancelled_owned()))))
}

/// A line of plain text as one event: clients split at every character that any language calls a line end, and
/// take the line `end` for the end.
fn log_line(line: &str) -> Bytes {
    let ends = |c: char| c.is_control() && c != '\t' || matches!(c, '\u{2028}' | '\u{2029}');
    let line = line.trim_end_matches(['\r', '\n']).replace(ends, " ");
    let mark = if line.trim() == "end" { "." } else { "" };
    format!("data: {line}{mark}\n\n").into()
}

#[cfg(test)]
mod tests {
    use super::{ANCHOR, LONGEST_LINE, Tail, log_line, new_from};
    use bytes::Bytes;

    #[test]
    fn only_what_is_new_is_found() {
        let old = "0123456789\n".repeat(100) + "last";
        assert_eq!(new_from(b"", b"abc"), 0);
        assert_eq!(new_from(b"abc", b"abcd"), 3);
        assert_eq!(new_from(old.as_bytes(), old.as_bytes()), old.len());
        // The window moved on.
        let window = old[200..].to_owned() + " word\n";
        assert_eq!(&window[new_from(old.as_bytes(), window.as_bytes())..], " word\n");
        // Nothing seen is left in it.
        assert_eq!(new_from(old.as_bytes(), &[b'x'; ANCHOR * 2]), 0);
        assert_eq!(new_from(old.as_bytes(), b"short"), 0);
    }

    #[test]
    fn lines_come_whole_and_once() {
        let mut tail = Tail::default();
        tail.look(Bytes::from_static(b"one\r\ntw"));
        tail.look(Bytes::from_static(b"one\r\ntwo\n"));
        tail.look(Bytes::from_static(b"one\r\ntwo\n"));
        assert_eq!(tail.lines, [&b"data: {\"line\":\"one\"}\n\n"[..], b"data: {\"line\":\"two\"}\n\n"]);
        tail.look(vec![b'x'; LONGEST_LINE + 1].into());
        assert_eq!((tail.lines.len(), tail.partial.len()), (3, 1));
    }

    #[test]
    fn a_build_line_is_one_event_and_never_the_end() {
        assert_eq!(log_line("a\u{2028}b\x0bc\td\r\n"), "data: a b c\td\n\n");
        assert_eq!(log_line("end"), "data: end.\n\n");
        assert_eq!(log_line(" end\n"), "data:  end.\n\n");
    }
}
