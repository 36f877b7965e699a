//! Snapshots.

use crate::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath, SnapshotPath},
    idempotency::RequestKey,
    responses::{AuthErrors, Conflict, IdempotencyErrors, NotFound, QueryErrors},
};
use axum::{Json, extract::State, http::StatusCode};
use keiki_types::api::{ErrorBody, Snapshot, SnapshotList};
use serde::Deserialize;
use utoipa::IntoParams;

/// Take a snapshot of a sandbox, which keeps running. The snapshot is durable when the call returns.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/snapshots", tag = "snapshots", operation_id = "take_snapshot",
    params(("id" = String, Path, description = "The sandbox"),
        RequestKey),
    responses((status = 201, description = "The snapshot", body = Snapshot), AuthErrors, NotFound, Conflict, IdempotencyErrors,
        (status = 503, description = "Try again after `Retry-After` seconds", body = ErrorBody),
        (status = 504, description = "The guest took too long", body = ErrorBody),
        (status = 507, description = "Not enough disk; nothing was created", body = ErrorBody)))]
pub(super) async fn take(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    key: RequestKey,
) -> Answer<(StatusCode, Json<Snapshot>)> {
    Ok((StatusCode::CREATED, Json(app.api.snapshot(id, key.of(&())).await?)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct OfQuery {
    /// Only snapshots of this sandbox.
    sandbox_id: Option<String>,
}

/// List snapshots, newest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", operation_id = "list_snapshots", params(OfQuery),
    responses((status = 200, description = "The snapshots", body = SnapshotList), AuthErrors, QueryErrors))]
pub(super) async fn list(State(app): State<App>, Query(query): Query<OfQuery>) -> Answer<Json<SnapshotList>> {
    // A text that is not an id has no snapshots.
    let Ok(of) = query.sandbox_id.as_deref().map(extract::sandbox_id).transpose() else {
        return Ok(Json(SnapshotList { snapshots: Vec::new() }));
    };
    Ok(Json(SnapshotList { snapshots: app.api.snapshots(of).await? }))
}

/// Get a snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "snapshots", operation_id = "get_snapshot",
    params(("id" = String, Path, description = "The snapshot")),
    responses((status = 200, description = "The snapshot", body = Snapshot), AuthErrors, NotFound))]
pub(super) async fn get(State(app): State<App>, SnapshotPath(id): SnapshotPath) -> Answer<Json<Snapshot>> {
    Ok(Json(app.api.get_snapshot(id).await?))
}

/// Delete a snapshot. Sandboxes restored from it stay.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "snapshots", operation_id = "delete_snapshot",
    params(("id" = String, Path, description = "The snapshot")),
    responses((status = 204, description = "Deleted"), AuthErrors, NotFound, Conflict))]
pub(super) async fn delete(State(app): State<App>, SnapshotPath(id): SnapshotPath) -> Answer<StatusCode> {
    app.api.delete_snapshot(id).await?;
    Ok(StatusCode::NO_CONTENT)
}
