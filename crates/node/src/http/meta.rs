//! About the node itself.

use super::{App, document::Any};
use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use keiki_types::api::{Health, Version};

/// Version of the node and what runs its machines.
#[utoipa::path(get, path = "/v1/version", tag = "node", operation_id = "version",
    responses((status = 200, description = "The version", body = Version), Any))]
pub(super) async fn version(State(app): State<App>) -> Json<Version> {
    Json(app.api.version())
}

/// Says that the node serves. Needs no key.
#[utoipa::path(get, path = "/healthz", tag = "node", operation_id = "health", security(()),
    responses((status = 200, description = "It serves", body = Health)))]
pub(super) async fn health() -> Json<Health> {
    Json(Health { status: "ok".into() })
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "node", operation_id = "openapi",
    responses((status = 200, description = "The OpenAPI document", body = Object), Any))]
pub(super) async fn document() -> Response {
    Json(super::openapi()).into_response()
}
