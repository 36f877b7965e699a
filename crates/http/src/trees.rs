//! Whole trees: as tar streams, and watched.

use super::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath},
    files::{PathQuery, check_path},
    responses::{Any, Asked, Guest, Named},
    sse,
    upload::Upload,
};
use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::header,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream, stream::BoxStream};
use keiki_api::{Result, Unpacking};
use keiki_types::api::{FsEvent, FsUnpacked};
use serde::Deserialize;
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct UnpackQuery {
    /// A directory in the sandbox.
    path: String,
    /// Take owners over by their numbers; else all is root's.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    owners: bool,
    /// The archive's top directory becomes `path` itself.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    strip_top: bool,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WatchQuery {
    /// Path in the sandbox.
    path: String,
    /// Also everything below.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    recursive: bool,
}

/// A file or directory as a tar stream, its last name on top: modes, owners, times, links, holes. An archive that could
/// not be finished ends with a broken body.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/archive", tag = "files", operation_id = "read_archive",
    params(("id" = String, Path, description = "The sandbox"), PathQuery),
    responses((status = 200, description = "The archive", body = Vec<u8>, content_type = "application/x-tar"),
        Any, Asked, Named, Guest))]
pub(super) async fn pack(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<PathQuery>,
) -> Answer<Response> {
    check_path("path", &query.path)?;
    let chunks = app.api.pack(id, &query.path).await?.inspect(|chunk| {
        if let Err(error) = chunk {
            tracing::warn!("an archive stopped in the middle: {}", super::errors::sentence(error));
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/x-tar")], Body::from_stream(chunks)).into_response())
}

/// Unpacks a tar stream into a directory. Files of the same name are replaced, directories are joined. An archive that
/// leads out of the directory, holds devices or does not fit is refused, and nothing of it is left.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/archive", tag = "files", operation_id = "write_archive",
    params(("id" = String, Path, description = "The sandbox"), UnpackQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 200, description = "Unpacked", body = FsUnpacked), Any, Asked, Named, Guest))]
pub(super) async fn unpack(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<UnpackQuery>,
    request: Request,
) -> Answer<Json<FsUnpacked>> {
    let body = Upload::of(request);
    let unpacked = async {
        check_path("path", &query.path)?;
        let how = Unpacking { owners: query.owners, strip_top: query.strip_top };
        app.api.unpack(id, &query.path, how, body.chunks()).await
    };
    let unpacked = unpacked.await;
    Ok(Json(body.settle(unpacked)?))
}

/// What changes at or below a path, as events named by their kind. The first is `ready`; `overflow` says that some are
/// missing. The stream ends when what is watched is gone.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/watch", tag = "files", operation_id = "watch",
    params(("id" = String, Path, description = "The sandbox"), WatchQuery),
    responses((status = 200, description = "The changes", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        Any, Asked, Named, Guest))]
pub(super) async fn watch(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<WatchQuery>,
) -> Answer<Response> {
    check_path("path", &query.path)?;
    let events = app.api.watch(id, &query.path, query.recursive).await?;
    let closing = app.closing.clone();
    Ok(sse::response(frames(events).take_until(closing.cancelled_owned())))
}

fn frames(events: BoxStream<'static, Result<FsEvent>>) -> impl Stream<Item = Bytes> + Send {
    stream::unfold(events, |mut events| async {
        let frame = match tokio::time::timeout(sse::PING_EVERY, events.next()).await {
            Err(_) => sse::PING,
            Ok(Some(Ok(event))) => sse::event(&event.kind.clone(), &event).into(),
            Ok(Some(Err(error))) => sse::error(&error).into(),
            Ok(None) => return None,
        };
        Some((frame, events))
    })
}
