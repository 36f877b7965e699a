//! Sandboxes and their life.

use super::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath},
    once::RequestKey,
    responses::{Any, Asked, Keyed, Later, Maker, Mover, Named, Stateful, Told},
};
use axum::{Json, extract::State, http::StatusCode};
use keiki_types::api::{CreateSandbox, Lifecycle, Sandbox, SandboxList, SetLifecycle};
use serde::Deserialize;
use utoipa::IntoParams;

/// Makes a sandbox from a template or a snapshot. It is ready for commands when this answers.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "create_sandbox",
    params(RequestKey),
    request_body = CreateSandbox,
    responses((status = 201, description = "Made and ready", body = Sandbox), Any, Told, Maker, Keyed,
        (status = 409, description = "What the request of this Idempotency-Key made was deleted since",
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
    /// Also measure each sandbox's memory.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    memory: bool,
}

/// All sandboxes, newest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "list_sandboxes", params(ListQuery),
    responses((status = 200, description = "The sandboxes", body = SandboxList), Any, Asked))]
pub(super) async fn list(
    State(app): State<App>,
    Query(query): Query<ListQuery>,
) -> Answer<Json<SandboxList>> {
    Ok(Json(SandboxList { items: app.api.list(query.memory).await? }))
}

/// One sandbox, with its memory use.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "get_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The sandbox", body = Sandbox), Any, Named))]
pub(super) async fn get(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.get(id).await?))
}

/// Ends a sandbox and frees all it had. Its snapshots and forks stay.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "delete_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 204, description = "Gone"), Any, Named, Mover))]
pub(super) async fn delete(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<StatusCode> {
    app.api.delete(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops the vCPUs; the memory stays.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes", operation_id = "pause_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "It is paused", body = Sandbox), Any, Named, Mover))]
pub(super) async fn pause(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.pause(id).await?))
}

/// Lets a paused sandbox go on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes", operation_id = "resume_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "It runs", body = Sandbox), Any, Named, Mover))]
pub(super) async fn resume(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.resume(id).await?))
}

/// Stores a sandbox and frees its memory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/hibernate", tag = "sandboxes", operation_id = "hibernate_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "It is hibernated", body = Sandbox), Any, Named, Mover, Later,
        (status = 507, description = "Not enough disk", body = keiki_types::api::ErrorBody)))]
pub(super) async fn hibernate(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.hibernate(id).await?))
}

/// Brings a hibernated sandbox back under its id. One that runs is left as it is.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/wake", tag = "sandboxes", operation_id = "wake_sandbox",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "It runs", body = Sandbox), Any, Named, Stateful, Maker))]
pub(super) async fn wake(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<Sandbox>> {
    Ok(Json(app.api.wake(id).await?))
}

/// How long it may live.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", operation_id = "get_lifecycle",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Its lifecycle", body = Lifecycle), Any, Named))]
pub(super) async fn lifecycle(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
) -> Answer<Json<Lifecycle>> {
    Ok(Json(app.api.lifecycle(id).await?))
}

/// Changes how long it may live.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", operation_id = "set_lifecycle",
    params(("id" = String, Path, description = "The sandbox")), request_body = SetLifecycle,
    responses((status = 200, description = "Its new lifecycle", body = Lifecycle), Any, Told, Named, Stateful))]
pub(super) async fn set_lifecycle(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<SetLifecycle>,
) -> Answer<Json<Lifecycle>> {
    Ok(Json(app.api.set_lifecycle(id, request).await?))
}
