//! About the node itself.

use super::{App, errors::Answer, responses::Any};
use axum::{
    Json,
    extract::State,
    http::header,
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

/// The type of the answer: what Prometheus asks for first.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the node counts and measures, for Prometheus. docs/METRICS.md lists it.
#[utoipa::path(get, path = "/metrics", tag = "node", operation_id = "metrics",
    responses((status = 200, description = "The metrics", body = String,
        content_type = "application/openmetrics-text"), Any))]
pub(super) async fn metrics(State(app): State<App>) -> Answer<Response> {
    let text = app.metrics.text_after(app.api.metrics().await?);
    Ok(([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response())
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "node", operation_id = "openapi",
    responses((status = 200, description = "The OpenAPI document", body = Object), Any))]
pub(super) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::openapi())
}
