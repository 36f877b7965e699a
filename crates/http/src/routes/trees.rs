//! Whole file trees: as tar streams, and watched.

use super::files::{PathQuery, check_path};
use crate::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath},
    responses::{AuthErrors, GuestErrors, NotFound, QueryErrors},
    sse,
    streaming::Upload,
};
use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::header,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use keiki_api::Unpacking;
use keiki_types::api::FsUnpacked;
use serde::Deserialize;
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct UnpackQuery {
    /// A directory in the sandbox.
    path: String,
    /// Keep numeric owners; otherwise everything belongs to root.
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
    /// Watch everything below, too.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    recursive: bool,
}

/// Download a file or directory as a tar stream with its last name on top: modes, owners, times, links, holes. If the
/// archive cannot be finished, the body is cut off.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/archive", tag = "files", operation_id = "read_archive",
    params(("id" = String, Path, description = "The sandbox"), PathQuery),
    responses((status = 200, description = "The archive", body = Vec<u8>, content_type = "application/x-tar"),
        AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn pack(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<PathQuery>,
) -> Answer<Response> {
    check_path("path", &query.path)?;
    let chunks = app.api.pack(id, &query.path).await?.inspect(|chunk| {
        if let Err(error) = chunk {
            tracing::warn!("an archive was cut off: {}", crate::errors::sentence(error));
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/x-tar")], Body::from_stream(chunks)).into_response())
}

/// Unpack a tar stream into a directory. Files of the same name are replaced, directories are merged. An archive that
/// leads out of the directory, contains devices or does not fit is refused and leaves nothing behind.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/archive", tag = "files", operation_id = "write_archive",
    params(("id" = String, Path, description = "The sandbox"), UnpackQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 200, description = "Counts of what was unpacked", body = FsUnpacked), AuthErrors, QueryErrors, NotFound, GuestErrors))]
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
    Ok(Json(body.finish(unpacked)?))
}

/// Watch a path for changes, as events named after their kind. The first is `ready`; `overflow` means that some are missing.
/// The stream ends when the watched path is gone.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/watch", tag = "files", operation_id = "watch",
    params(("id" = String, Path, description = "The sandbox"), WatchQuery),
    responses((status = 200, description = "The changes", body = sse::ServerSentEvent, content_type = "text/event-stream"),
        AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn watch(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<WatchQuery>,
) -> Answer<Response> {
    check_path("path", &query.path)?;
    let events = app.api.watch(id, &query.path, query.recursive).await?;
    let events = events.map(|event| match event {
        Ok(event) => sse::event(&event.kind, &event),
        Err(error) => sse::error(&error),
    });
    Ok(sse::response(events.take_until(app.closing.cancelled_owned())))
}
