//! `/v1` over HTTP.
//!
//! A thin layer: a request becomes a typed value (`extract`), the value one call of [`keiki_api::Api`], the
//! result a body of `keiki_types::api`. Nothing is decided here that a caller without HTTP would need too. What is
//! HTTP's own is here: the error envelope (`errors`), ids and log lines of requests (`observe`), API keys (`key`),
//! streams (`sse`, `pty`, `files`), the document (`document`), and the listener's limits (`serve`).
//!
//! ```text
//! listener ─ limits ─ observe: id, one log line, envelope ─ authorize: key ─ handler ─ Api (the node)
//! ```
//!
//! The path and method of a route are written once, at its handler; [`keyed`] lists the handlers, for the router and for
//! the document.

mod alive;
mod body;
mod document;
mod errors;
mod events;
mod exec;
mod execs;
mod extract;
mod files;
mod fork;
mod key;
mod logs;
mod meta;
mod metrics;
mod observe;
mod once;
mod ports;
mod proxy;
mod pty;
mod refusals;
mod responses;
mod sandboxes;
mod serve;
mod snapshots;
mod sse;
mod tcp;
mod templates;
#[cfg(test)]
mod tests;
mod trees;
mod upload;

pub use serve::serve;

use axum::{Router, middleware, routing};
use keiki_api::Api;
use metrics::Metrics;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use utoipa::openapi::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

/// What handlers share.
#[derive(Clone)]
struct App {
    api: Arc<dyn Api>,
    metrics: Metrics,
    /// The node stops: streams without an end of their own end.
    closing: CancellationToken,
}

impl App {
    fn new(api: Arc<dyn Api>) -> Self {
        Self { api, metrics: Metrics::default(), closing: CancellationToken::new() }
    }
}

/// Every route that asks for a key. A handler's path and method stand in its documentation.
fn keyed() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(document::base())
        .routes(routes!(sandboxes::create, sandboxes::list))
        .routes(routes!(sandboxes::get, sandboxes::delete))
        .routes(routes!(sandboxes::pause))
        .routes(routes!(sandboxes::resume))
        .routes(routes!(sandboxes::hibernate))
        .routes(routes!(sandboxes::wake))
        .routes(routes!(sandboxes::lifecycle, sandboxes::set_lifecycle))
        .routes(routes!(fork::fork))
        .routes(routes!(fork::fork_tree))
        .routes(routes!(fork::promote))
        .routes(routes!(snapshots::take))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::get, snapshots::delete))
        .routes(routes!(exec::buffered))
        .routes(routes!(exec::stream))
        .routes(routes!(execs::start, execs::list))
        .routes(routes!(execs::get, execs::delete))
        .routes(routes!(execs::attach))
        .routes(routes!(execs::signal))
        .routes(routes!(execs::stdin))
        .routes(routes!(pty::open))
        .routes(routes!(pty::attach))
        .routes(routes!(files::read, files::write, files::delete))
        .routes(routes!(files::list))
        .routes(routes!(files::stat))
        .routes(routes!(files::mkdir))
        .routes(routes!(files::rename))
        .routes(routes!(files::remove))
        .routes(routes!(files::chmod))
        .routes(routes!(files::symlink))
        .routes(routes!(trees::pack, trees::unpack))
        .routes(routes!(trees::watch))
        .routes(routes!(ports::list))
        .routes(routes!(ports::create))
        .routes(routes!(tcp::tcp))
        .routes(routes!(logs::console))
        .routes(routes!(events::of_sandbox))
        .routes(routes!(events::of_all))
        .routes(routes!(templates::list))
        .routes(routes!(templates::get, templates::delete))
        .routes(routes!(templates::build))
        .routes(routes!(templates::builds))
        .routes(routes!(templates::get_build))
        .routes(routes!(logs::build))
        .routes(routes!(meta::version))
        .routes(routes!(meta::document))
        .routes(routes!(meta::metrics))
}

/// Routes without a key.
fn open() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(meta::health))
}

/// The OpenAPI document.
#[must_use]
pub fn openapi() -> OpenApi {
    keyed().merge(open()).into_openapi()
}

fn routes(app: App) -> Router {
    // One operation of the document, but any method and three paths of the router.
    let keyed = proxy::BY_PATH
        .iter()
        .fold(Router::from(keyed()), |router, path| router.route(path, routing::any(proxy::by_path)))
        .route_layer(middleware::from_fn_with_state(app.clone(), key::authorize));
    keyed
        .merge(Router::from(open()))
        .layer(middleware::from_fn_with_state(app.clone(), proxy::by_host))
        .layer(middleware::from_fn_with_state(app.clone(), observe::observe))
        .with_state(app)
}
