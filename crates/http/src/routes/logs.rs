//! Logs: a guest's console, and the log of a template build.

use crate::{
    App,
    errors::Answer,
    extract::{self, BuildPath, Query, SandboxPath},
    responses::{AuthErrors, NotFound, QueryErrors},
    sse,
};
use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response, sse::Event},
};
use bytes::Bytes;
use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use keiki_types::SandboxId;
use serde::Deserialize;
use std::{collections::VecDeque, time::Duration};
use utoipa::{IntoParams, ToSchema};

/// Bytes of the console in one answer.
const SHOWN: usize = 1 << 20;
/// Bytes of the console that are read again while it is followed.
const WATCHED: usize = 256 << 10;
/// Interval of these reads.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A longer line is cut, so that output without line ends is sent, too.
const LONGEST_LINE: usize = 16 << 10;
/// Bytes at the end of one read that locate it in the next.
const ANCHOR: usize = 512;
/// A build's log that is silent for this long has no more lines for now.
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
    /// The console is `stdout`; `stderr` is empty.
    #[serde(default)]
    #[param(inline, required = false)]
    stream: Which,
    /// Keep sending new lines, as server-sent events `{"line": "…"}`.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    follow: bool,
}

/// Get or follow a sandbox's console.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", tag = "sandboxes", operation_id = "console",
    params(("id" = String, Path, description = "The sandbox"), LogsQuery),
    responses((status = 200, description = "The end of the console; with `follow`, events", content(
            (String = "text/plain"), (sse::ServerSentEvent = "text/event-stream"))),
        AuthErrors, QueryErrors, NotFound))]
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
    if stream == Which::Stderr {
        return Ok(sse::response(stream::empty()));
    }
    let closing = app.closing.clone().cancelled_owned();
    Ok(sse::response(followed(app, id, shown).take_until(closing)))
}

/// A console that is followed: each read returns its end, and new is what comes after the end of the last read.
#[derive(Default)]
struct Tail {
    seen: Bytes,
    partial: Vec<u8>,
    lines: VecDeque<String>,
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
        self.lines.push_back(sse::ascii_json(&serde_json::json!({ "line": line })));
    }
}

/// Where in `shown` the part starts that was not in `seen`.
fn new_from(seen: &[u8], shown: &[u8]) -> usize {
    if shown.starts_with(seen) {
        return seen.len();
    }
    let anchor = &seen[seen.len().saturating_sub(ANCHOR)..];
    // No trace of the last read: more came than one read returns, or it is another machine now.
    (0..=shown.len().saturating_sub(anchor.len()))
        .rev()
        .find(|at| shown[*at..].starts_with(anchor))
        .map_or(0, |at| at + anchor.len())
}

fn followed(app: App, id: SandboxId, shown: Bytes) -> impl Stream<Item = Event> + Send {
    let mut tail = Tail::default();
    tail.look(shown);
    stream::unfold((app, tail), move |(app, mut tail)| async move {
        loop {
            if let Some(line) = tail.lines.pop_front() {
                return Some((Event::default().data(line), (app, tail)));
            }
            tokio::time::sleep(LOOK_EVERY).await;
            // The console ends with its sandbox.
            tail.look(app.api.console(id, WATCHED).await.ok()?);
        }
    })
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct BuildQuery {
    /// Wait for new lines until the build ends.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    follow: bool,
}

/// Get or follow the log of a build: one event for each line, then `end`.
#[utoipa::path(get, path = "/v1/templates/builds/{id}/logs", tag = "templates", operation_id = "build_logs",
    params(("id" = String, Path, description = "The build"), BuildQuery),
    responses((status = 200, description = "The lines", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        AuthErrors, QueryErrors, NotFound))]
pub(super) async fn build(
    State(app): State<App>,
    BuildPath(id): BuildPath,
    Query(BuildQuery { follow }): Query<BuildQuery>,
) -> Answer<Response> {
    let lines = app.api.build_log(&id).await?;
    let lines = if follow { lines } else { until_quiet(lines) };
    let end = stream::once(async { Event::default().data("end") });
    let events = lines.map(|line| Event::default().data(log_line(&line))).chain(end);
    Ok(sse::response(events.take_until(app.closing.cancelled_owned())))
}

/// The lines written by now.
fn until_quiet(lines: BoxStream<'static, String>) -> BoxStream<'static, String> {
    let lines = stream::unfold(lines, |mut lines| async {
        let line = tokio::time::timeout(QUIET, lines.next()).await.ok()??;
        Some((line, lines))
    });
    lines.boxed()
}

/// A line of text as one event: clients split at every character that some language calls a line end, and take the line
/// `end` for the end.
fn log_line(line: &str) -> String {
    let ends = |c: char| c.is_control() && c != '\t' || matches!(c, '\u{2028}' | '\u{2029}');
    let line = line.trim_end_matches(['\r', '\n']).replace(ends, " ");
    let mark = if line.trim() == "end" { "." } else { "" };
    line + mark
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
        assert_eq!(tail.lines, [r#"{"line":"one"}"#, r#"{"line":"two"}"#]);
        tail.look(vec![b'x'; LONGEST_LINE + 1].into());
        assert_eq!((tail.lines.len(), tail.partial.len()), (3, 1));
    }

    #[test]
    fn a_build_line_is_one_event_and_never_the_end() {
        assert_eq!(log_line("a\u{2028}b\x0bc\td\r\n"), "a b c\td");
        assert_eq!(log_line("end"), "end.");
        assert_eq!(log_line(" end\n"), " end.");
    }
}
