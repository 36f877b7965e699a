//! A terminal in a sandbox, over a WebSocket.
//!
//! Binary frames are bytes, both ways. Text frames are JSON: from the client `{"resize":{"cols":c,"rows":r}}`,
//! `{"signal":n}`, `{"eof":true}` or `{"detach":true}`; from the node `{"error":"…"}`, and last `{"exit_code":n}` or
//! `{"detached":true}`. Input and output run side by side, so that a program that reads nothing can still write. When one
//! ends, so does the other. A client that disconnects without `detach` ends the command, unless it asked to `keep` it or
//! attached to a running one.

use super::exec::{EXEC, lost};
use crate::{
    App,
    errors::Answer,
    extract::{self, ExecPath, Query, SandboxPath},
    responses::{AuthErrors, GuestErrors, NotFound, QueryErrors},
    sse,
    websocket::{DEAD_AFTER, failure, pings, upgraded},
};
use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{Message, WebSocket},
    },
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{
    SinkExt, StreamExt,
    stream::{BoxStream, SplitSink, SplitStream},
};
use keiki_api::{Control, Error, ExecEvent, ReadFrom, Result, Session, request};
use keiki_types::api::{ErrorBody, ExecRequest};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use utoipa::IntoParams;

/// The default command.
const SHELL: &str = r#"exec "$(command -v bash || command -v sh)" -l"#;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct PtyQuery {
    /// Columns, 1 to 1000; default 80.
    cols: Option<u32>,
    /// Rows, 1 to 1000; default 24.
    rows: Option<u32>,
    /// A shell command line; default: a login shell.
    cmd: Option<String>,
    /// Working directory; default: the user's home.
    cwd: Option<String>,
    /// User name or `uid[:gid]`; default: root.
    user: Option<String>,
    /// Keep the command running when the connection is lost, so that a client can attach again.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    keep: bool,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct AttachQuery {
    /// Bytes of output to skip.
    offset: Option<u64>,
    /// Instead of `offset`: start this many bytes before the end; default 65536.
    tail: Option<u64>,
}

/// Enough to redraw a screen.
const DEFAULT_TAIL: u64 = 64 << 10;

/// Run a command in a terminal, over a WebSocket. Binary frames are its input and output. Text frames are JSON:
/// `{"resize":{"cols":c,"rows":r}}`, `{"signal":n}`, `{"eof":true}` and `{"detach":true}` from the client, `{"error":"…"}` and
/// finally `{"exit_code":n}` or `{"detached":true}` from the node. The answer's header `X-Keiki-Exec` is the command's id.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/exec/pty", tag = "exec", operation_id = "exec_pty",
    params(("id" = String, Path, description = "The sandbox"), PtyQuery),
    responses((status = 101, description = "The terminal"), AuthErrors, QueryErrors, NotFound, GuestErrors,
        (status = 426, description = "Not a WebSocket request", body = ErrorBody)))]
pub(super) async fn open(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<PtyQuery>,
    upgrade: WebSocketUpgrade,
) -> Answer<Response> {
    let request = ExecRequest {
        cmd: Some(query.cmd.unwrap_or_else(|| SHELL.into())),
        cwd: query.cwd,
        user: query.user,
        ..ExecRequest::default()
    };
    let size = (query.cols.unwrap_or(80), query.rows.unwrap_or(24));
    let session = app.api.exec(id, request, Some(size)).await?;
    if query.keep {
        session.control.leave();
    }
    Ok(terminal(upgrade, session, app))
}

/// Attach to the terminal of a running command, over a WebSocket as for `exec/pty`. The previous client is notified and
/// disconnected. Disconnecting does not end the command.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs/{exec}/pty", tag = "exec", operation_id = "attach_pty",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command"),
        AttachQuery),
    responses((status = 101, description = "The terminal"), AuthErrors, QueryErrors, NotFound, GuestErrors,
        (status = 426, description = "Not a WebSocket request", body = ErrorBody)))]
pub(super) async fn attach(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    ExecPath(exec): ExecPath,
    Query(query): Query<AttachQuery>,
    upgrade: WebSocketUpgrade,
) -> Answer<Response> {
    let from = match query.offset {
        Some(_) if query.tail.is_some() => {
            return Err(Error::Invalid("give offset or tail, not both".into()).into());
        }
        Some(offset) => ReadFrom::Offsets([offset, 0]),
        None => ReadFrom::Tail(query.tail.unwrap_or(DEFAULT_TAIL)),
    };
    let session = app.api.attach_exec(id, &exec, from).await?;
    Ok(terminal(upgrade, session, app))
}

fn terminal(upgrade: WebSocketUpgrade, session: Session, app: App) -> Response {
    let name = [(EXEC, session.id.clone())];
    (name, upgraded(upgrade, |socket| serve(socket, session, app))).into_response()
}

async fn serve(socket: WebSocket, session: Session, app: App) {
    let (mut to_client, from_client) = socket.split();
    let Session { events, control, .. } = session;
    let left = tokio::select! {
        () = output(events, &mut to_client) => false,
        left = input(from_client, control) => left,
        () = app.closing.cancelled() => false,
    };
    if left {
        // The client may be gone already.
        let _ = to_client.send(Message::Text(r#"{"detached":true}"#.into())).await;
        let _ = to_client.close().await;
    }
}

async fn output(
    mut events: BoxStream<'static, Result<ExecEvent>>,
    client: &mut SplitSink<WebSocket, Message>,
) {
    let mut pings = pings();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            _ = pings.tick() => {
                if client.send(Message::Ping(Bytes::new())).await.is_err() {
                    return;
                }
                continue;
            }
        };
        let error = match event {
            Some(Ok(ExecEvent::Stdout { data, .. } | ExecEvent::Stderr { data, .. })) => {
                if client.send(Message::Binary(data)).await.is_err() {
                    return;
                }
                continue;
            }
            Some(Ok(ExecEvent::Exit { code, message, .. })) => {
                if !message.is_empty() {
                    // The client may be gone.
                    let _ = client.send(Message::Binary(format!("{message}\r\n").into())).await;
                }
                let exit = sse::ascii_json(&json!({ "exit_code": code }));
                let _ = client.send(Message::Text(exit.into())).await;
                break;
            }
            Some(Err(error)) => error,
            None => lost(),
        };
        let _ = client.send(failure(&error)).await;
        break;
    }
    let _ = client.close().await;
}

/// A text frame of a client.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Wish {
    Resize { cols: u32, rows: u32 },
    Signal(i32),
    Eof(bool),
    Detach(bool),
}

/// Passes on what the client sends. True: the client detached.
async fn input(mut client: SplitStream<WebSocket>, control: Arc<dyn Control>) -> bool {
    while let Ok(Some(Ok(message))) = tokio::time::timeout(DEAD_AFTER, client.next()).await {
        let done = match message {
            Message::Binary(bytes) => control.input(bytes, false).await,
            Message::Text(text) => match wish(&text) {
                Ok(Wish::Resize { cols, rows }) => control.resize(cols, rows).await,
                Ok(Wish::Signal(signal)) => control.signal(signal).await,
                Ok(Wish::Eof(true)) => control.input(Bytes::new(), true).await,
                Ok(Wish::Detach(true)) => {
                    control.leave();
                    return true;
                }
                Ok(Wish::Eof(false) | Wish::Detach(false)) => Ok(()),
                Err(error) => Err(error),
            },
            Message::Ping(_) | Message::Pong(_) => Ok(()),
            Message::Close(_) => return false,
        };
        if let Err(error) = done {
            // An invalid frame, or the command accepts no more input: its output may continue.
            tracing::debug!("a terminal's input was dropped: {error}");
        }
    }
    false
}

fn wish(text: &str) -> Result<Wish> {
    match serde_json::from_str(text).map_err(|error| Error::Invalid(error.to_string()))? {
        Wish::Resize { cols, rows } => request::terminal(cols, rows).map(|_| Wish::Resize { cols, rows }),
        Wish::Signal(signal) if !(1..=64).contains(&signal) => {
            Err(Error::Invalid(format!("no signal {signal}")))
        }
        wish => Ok(wish),
    }
}

#[cfg(test)]
mod tests {
    use super::{Wish, wish};

    #[test]
    fn wishes_are_read_and_nonsense_refused() {
        assert_eq!(
            wish(r#"{"resize":{"cols":120,"rows":40}}"#).ok(),
            Some(Wish::Resize { cols: 120, rows: 40 })
        );
        assert_eq!(wish(r#"{"signal":2}"#).ok(), Some(Wish::Signal(2)));
        assert_eq!(wish(r#"{"eof":true}"#).ok(), Some(Wish::Eof(true)));
        assert_eq!(wish(r#"{"detach":true}"#).ok(), Some(Wish::Detach(true)));
        for bad in ["", "x", "{}", r#"{"signal":0}"#, r#"{"signal":65}"#, r#"{"resize":{"cols":0,"rows":1}}"#]
        {
            assert!(wish(bad).is_err(), "{bad}");
        }
    }
}
