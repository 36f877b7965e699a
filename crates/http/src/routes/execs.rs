//! Commands that outlive their caller.

use super::exec;
use crate::{
    App,
    errors::{self, Answer},
    extract::{self, ExecPath, LARGE, Query, SandboxPath},
    responses::{AuthErrors, BodyErrors, GuestErrors, NotFound, QueryErrors},
    sse,
    streaming::Upload,
};
use axum::{
    Json,
    extract::{Request, State},
    http::{HeaderMap, StatusCode},
    response::Response,
};
use keiki_api::{Error, ReadFrom, Result};
use keiki_types::api::execs::{Exec, ExecList, InputTaken, SignalExec, StartExec};
use serde::Deserialize;
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct FromQuery {
    /// Bytes of standard output to skip.
    stdout_offset: Option<u64>,
    /// Bytes of standard error to skip.
    stderr_offset: Option<u64>,
    /// Instead of offsets: start this many bytes before the end of each stream.
    tail: Option<u64>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct InputQuery {
    /// End the input after these bytes.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    eof: bool,
}

/// Start a command that outlives its caller.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/execs", tag = "exec", operation_id = "start_exec",
    params(("id" = String, Path, description = "The sandbox")), request_body = StartExec,
    responses((status = 201, description = "The command, running", body = Exec), AuthErrors, BodyErrors, NotFound, GuestErrors))]
pub(super) async fn start(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<StartExec, LARGE>,
) -> Answer<(StatusCode, Json<Exec>)> {
    Ok((StatusCode::CREATED, Json(app.api.start_exec(id, request).await?)))
}

/// List running and recently ended commands, oldest first.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs", tag = "exec", operation_id = "list_execs",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The commands", body = ExecList), AuthErrors, NotFound, GuestErrors))]
pub(super) async fn list(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<ExecList>> {
    Ok(Json(ExecList { items: app.api.execs(id).await? }))
}

/// Get a command.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs/{exec}", tag = "exec", operation_id = "get_exec",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command")),
    responses((status = 200, description = "The command", body = Exec), AuthErrors, NotFound, GuestErrors))]
pub(super) async fn get(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    ExecPath(exec): ExecPath,
) -> Answer<Json<Exec>> {
    Ok(Json(app.api.get_exec(id, &exec).await?))
}

/// Kill a command and forget it.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/execs/{exec}", tag = "exec", operation_id = "delete_exec",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command")),
    responses((status = 204, description = "Deleted"), AuthErrors, NotFound, GuestErrors))]
pub(super) async fn delete(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    ExecPath(exec): ExecPath,
) -> Answer<StatusCode> {
    app.api.remove_exec(id, &exec).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Read a command's output from the given offsets on, then its exit. Events are as for `exec/stream`, with `offset` and an
/// id to resume from (`Last-Event-ID`). Disconnecting does not end the command.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/execs/{exec}/stream", tag = "exec", operation_id = "attach_exec",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command"),
        FromQuery),
    responses((status = 200, description = "Events of the command", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn attach(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    ExecPath(exec): ExecPath,
    Query(query): Query<FromQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    let last =
        headers.get(sse::LAST_EVENT_ID).and_then(|value| value.to_str().ok()).map(event_id).transpose()?;
    let from = match (last, query.tail) {
        (Some(offsets), _) => ReadFrom::Offsets(offsets),
        (None, Some(_)) if query.stdout_offset.is_some() || query.stderr_offset.is_some() => {
            return Err(Error::Invalid("give offsets or tail, not both".into()).into());
        }
        (None, Some(tail)) => ReadFrom::Tail(tail),
        (None, None) => {
            ReadFrom::Offsets([query.stdout_offset.unwrap_or(0), query.stderr_offset.unwrap_or(0)])
        }
    };
    let session = app.api.attach_exec(id, &exec, from).await?;
    Ok(sse::response(exec::events(session, None, true)))
}

fn event_id(text: &str) -> Result<[u64; 2]> {
    let both = text.split_once('-').and_then(|(out, err)| Some([out.parse().ok()?, err.parse().ok()?]));
    both.ok_or_else(|| {
        Error::Invalid(format!(
            "Last-Event-ID must be the id of an event of this stream, not {:?}",
            errors::shown(text)
        ))
    })
}

/// Send a signal to every process of a command.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/execs/{exec}/signal", tag = "exec", operation_id = "signal_exec",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command")),
    request_body = SignalExec,
    responses((status = 204, description = "Sent"), AuthErrors, BodyErrors, NotFound, GuestErrors))]
pub(super) async fn signal(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    ExecPath(exec): ExecPath,
    extract::Json(request): extract::Json<SignalExec>,
) -> Answer<StatusCode> {
    app.api.signal_exec(id, &exec, request.signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Write to a command's standard input or terminal. Responds when the guest has accepted all bytes.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/execs/{exec}/stdin", tag = "exec", operation_id = "write_exec",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command"),
        InputQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "The number of bytes written", body = InputTaken), AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn stdin(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    ExecPath(exec): ExecPath,
    Query(query): Query<InputQuery>,
    request: Request,
) -> Answer<Json<InputTaken>> {
    let body = Upload::of(request);
    let taken = app.api.write_exec(id, &exec, body.chunks(), query.eof).await;
    Ok(Json(InputTaken { bytes: body.finish(taken)? }))
}

#[cfg(test)]
mod tests {
    use super::event_id;

    #[test]
    fn event_ids_are_two_offsets() {
        assert_eq!(event_id("12-0").ok(), Some([12, 0]));
        for bad in ["", "12", "-", "1-", "-1", "1-2-3", "1 - 2", "99999999999999999999-0"] {
            assert!(event_id(bad).is_err(), "{bad}");
        }
    }
}
