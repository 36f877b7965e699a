//! `/v1` over HTTP.
//!
//! A thin layer: a request becomes a typed value (`extract`), the value one call of
//! [`keiki_api::Api`], and the result a body of `keiki_types::api`. Whatever a caller without HTTP
//! would also need is decided in the node.
//!
//! ```text
//! serve: limits ─ observe: id, log line, envelope ─ proxy: by host ─ key ─ routes: handler ─ Api (the node)
//! ```
//!
//! To add a route, write its handler in `routes` and list it in `routes::keyed`: its path, method
//! and documentation are written at the handler, and the router and the OpenAPI document read them
//! there.

mod body;
mod document;
mod errors;
mod extract;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod idempotency;
mod key;
mod metrics;
mod observe;
mod proxy;
mod responses;
mod routes;
mod serve;
mod sse;
mod streaming;
#[cfg(test)]
mod tests;
mod websocket;

pub use serve::serve;

use axum::{Router, middleware, routing};
use keiki_api::Api;
use metrics::Metrics;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use utoipa::openapi::OpenApi;

/// What handlers share.
#[derive(Clone)]
struct App {
    api: Arc<dyn Api>,
    metrics: Metrics,
    /// Cancelled when the node stops: endless streams end.
    closing: CancellationToken,
}

impl App {
    fn new(api: Arc<dyn Api>) -> Self {
        Self { api, metrics: Metrics::default(), closing: CancellationToken::new() }
    }
}

/// The OpenAPI document.
#[must_use]
pub fn openapi() -> OpenApi {
    routes::keyed().merge(routes::open()).into_openapi()
}

fn router(app: App) -> Router {
    // The document has it as one operation; the router has three paths and every method.
    let keyed = proxy::BY_PATH
        .iter()
        .fold(Router::from(routes::keyed()), |router, path| router.route(path, routing::any(proxy::by_path)))
        .route_layer(middleware::from_fn_with_state(app.clone(), key::authorize));
    keyed
        .merge(Router::from(routes::open()))
        .layer(middleware::from_fn_with_state(app.clone(), proxy::by_host))
        .layer(middleware::from_fn_with_state(app.clone(), observe::observe))
        .with_state(app)
}
