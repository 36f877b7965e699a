//! The node itself.

use crate::{App, errors::Answer, responses::AuthErrors};
use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use keiki_types::api::{Health, Version};

/// Get the version of the node and of its engine.
#[utoipa::path(get, path = "/v1/version", tag = "node", operation_id = "version",
    responses((status = 200, description = "The version", body = Version), AuthErrors))]
pub(super) async fn version(State(app): State<App>) -> Json<Version> {
    Json(app.api.version())
}

/// Check that the node serves requests. Needs no key.
#[utoipa::path(get, path = "/healthz", tag = "node", operation_id = "health", security(()),
    responses((status = 200, description = "The node serves requests", body = Health)))]
pub(super) async fn health() -> Json<Health> {
    Json(Health { status: "ok".into() })
}

/// The format that Prometheus prefers.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Get the node's metrics in OpenMetrics format. docs/METRICS.md lists them.
#[utoipa::path(get, path = "/metrics", tag = "node", operation_id = "metrics",
    responses((status = 200, description = "The metrics", body = String,
        content_type = "application/openmetrics-text"), AuthErrors))]
pub(super) async fn metrics(State(app): State<App>) -> Answer<Response> {
    let text = app.metrics.text_after(app.api.metrics().await?);
    Ok(([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response())
}

/// Get this document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "node", operation_id = "openapi",
    responses((status = 200, description = "The OpenAPI document", body = Object), AuthErrors))]
pub(super) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::openapi())
}
