//! Sandboxes.

use crate::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath},
    idempotency::RequestKey,
    responses::{
        AuthErrors, BodyErrors, CapacityErrors, Conflict, IdempotencyErrors, NotFound, QueryErrors,
        RetryLater, TransitionErrors,
    },
};
use axum::{Json, extract::State, http::StatusCode};
use keiki_types::api::{CreateSandbox, Lifecycle, Sandbox, SandboxList, SetLifecycle};
use serde::Deserialize;
use utoipa::IntoParams;

/// Create a sandbox from a template or a snapshot. It is ready for commands when the call returns.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "create_sandbox",
    params(RequestKey),
    request_body = CreateSandbox,
    responses((status = 201, description = "The sandbox, ready for commands", body = Sandbox), AuthErrors, BodyErrors, CapacityErrors, IdempotencyErrors,
        (status = 409, description = "The sandbox made by this Idempotency-Key was deleted",
            body = keiki_types::api::ErrorBody),
        (status = 404, description = "No such template or snapshot", body = keiki_types::api::ErrorBody)))]
pub(super) async fn create(
    State(app): State<App>,
    key: RequestKey,
    extract::Json(request): extract::Json<CreateSandbox>,
) -> Answer<(StatusCode, Json<Sandbox>)> {
    let once = key.of(&request);
    Ok((StatusCode::CREATED, Json(app.api.create(request, once).await?)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// Measure the memory of each sandbox, too.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    memory: bool,
}

/// List all sandboxes, newest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "list_sandboxes", params(ListQuery),
    responses((status = 200, description = "The sandboxes", body = SandboxList), AuthErrors, QueryErrors))]
pub(super) async fn list(
    State(app): State<App>,
    Query(query): Query<ListQuery>,
) -> Answer<Json<SandboxList>> {
    Ok(Json(SandboxList { items: app.api.list(query.memory).await? }))
}

/// Get a sandbox, with its memory use.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "get_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The sandbox", body = Sandbox), AuthErrors, NotFound))]
pub(super) async fn get(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.get(id).await?))
}

/// Delete a sandbox and free its resources. Its snapshots and forks stay.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "delete_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 204, description = "Deleted"), AuthErrors, NotFound, TransitionErrors))]
pub(super) async fn delete(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<StatusCode> {
    app.api.delete(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Pause a sandbox: its vCPUs stop, its memory stays.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes", operation_id = "pause_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The paused sandbox", body = Sandbox), AuthErrors, NotFound, TransitionErrors))]
pub(super) async fn pause(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.pause(id).await?))
}

/// Resume a paused sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes", operation_id = "resume_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The running sandbox", body = Sandbox), AuthErrors, NotFound, TransitionErrors))]
pub(super) async fn resume(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.resume(id).await?))
}

/// Hibernate a sandbox: store it on disk and free its memory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/hibernate", tag = "sandboxes", operation_id = "hibernate_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The hibernated sandbox", body = Sandbox), AuthErrors, NotFound, TransitionErrors, RetryLater,
        (status = 507, description = "Not enough disk", body = keiki_types::api::ErrorBody)))]
pub(super) async fn hibernate(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.hibernate(id).await?))
}

/// Wake a hibernated sandbox. A running one stays as it is.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/wake", tag = "sandboxes", operation_id = "wake_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The running sandbox", body = Sandbox), AuthErrors, NotFound, Conflict, CapacityErrors))]
pub(super) async fn wake(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.wake(id).await?))
}

/// Get the TTL and the idle time of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", operation_id = "get_lifecycle",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The lifecycle", body = Lifecycle), AuthErrors, NotFound))]
pub(super) async fn lifecycle(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
) -> Answer<Json<Lifecycle>> {
    Ok(Json(app.api.lifecycle(id).await?))
}

/// Change the TTL of a sandbox, or make it persistent.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", operation_id = "set_lifecycle",
    params(("id" = String, Path, description = "The sandbox")), request_body = SetLifecycle,
    responses((status = 200, description = "The new lifecycle", body = Lifecycle), AuthErrors, BodyErrors, NotFound, Conflict))]
pub(super) async fn set_lifecycle(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<SetLifecycle>,
) -> Answer<Json<Lifecycle>> {
    Ok(Json(app.api.set_lifecycle(id, request).await?))
}
