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
//! The path and method of a route are written once, at its handler; the router and the document read them there.

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

pub use document::openapi;
pub use serve::serve;

use axum::{Router, handler::Handler, middleware, routing};
use keiki_api::Api;
use metrics::Metrics;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// What handlers share.
#[derive(Clone)]
struct App {
    api: Arc<dyn Api>,
    metrics: Metrics,
    document: Arc<utoipa::openapi::OpenApi>,
    /// The node stops: streams without an end of their own end.
    closing: CancellationToken,
}

impl App {
    fn new(api: Arc<dyn Api>) -> Self {
        Self {
            api,
            metrics: Metrics::default(),
            document: Arc::new(openapi()),
            closing: CancellationToken::new(),
        }
    }
}

/// Adds handlers under the path and method that their documentation states.
macro_rules! add {
    ($router:expr, $($module:ident::$handler:ident as $documented:ident),* $(,)?) => {
        $router$(.route(&path::<$module::$documented>(), on::<$module::$documented, _, _>($module::$handler)))*
    };
}

fn path<D: utoipa::Path>() -> String {
    D::path()
}

fn on<D, H, T>(handler: H) -> routing::MethodRouter<App>
where
    D: utoipa::Path,
    H: Handler<T, App>,
    T: 'static,
{
    use utoipa::openapi::HttpMethod;
    let filter = |method: HttpMethod| match method {
        HttpMethod::Get => routing::MethodFilter::GET,
        HttpMethod::Post => routing::MethodFilter::POST,
        HttpMethod::Put => routing::MethodFilter::PUT,
        HttpMethod::Delete => routing::MethodFilter::DELETE,
        HttpMethod::Options => routing::MethodFilter::OPTIONS,
        HttpMethod::Head => routing::MethodFilter::HEAD,
        HttpMethod::Patch => routing::MethodFilter::PATCH,
        HttpMethod::Trace => routing::MethodFilter::TRACE,
    };
    D::methods()
        .into_iter()
        .fold(routing::MethodRouter::new(), |router, method| router.on(filter(method), handler.clone()))
}

fn routes(app: App) -> Router {
    let keyed = add!(
        Router::new(),
        sandboxes::create as __path_create,
        sandboxes::list as __path_list,
        sandboxes::get as __path_get,
        sandboxes::delete as __path_delete,
        sandboxes::pause as __path_pause,
        sandboxes::resume as __path_resume,
        sandboxes::hibernate as __path_hibernate,
        sandboxes::wake as __path_wake,
        sandboxes::lifecycle as __path_lifecycle,
        sandboxes::set_lifecycle as __path_set_lifecycle,
        fork::fork as __path_fork,
        fork::fork_tree as __path_fork_tree,
        fork::promote as __path_promote,
        logs::console as __path_console,
        ports::list as __path_list,
        ports::create as __path_create,
        events::of_sandbox as __path_of_sandbox,
        events::of_all as __path_of_all,
        exec::buffered as __path_buffered,
        exec::stream as __path_stream,
        execs::start as __path_start,
        execs::list as __path_list,
        execs::get as __path_get,
        execs::delete as __path_delete,
        execs::attach as __path_attach,
        execs::signal as __path_signal,
        execs::stdin as __path_stdin,
        pty::open as __path_open,
        pty::attach as __path_attach,
        tcp::tcp as __path_tcp,
        files::read as __path_read,
        files::write as __path_write,
        files::delete as __path_delete,
        files::list as __path_list,
        files::stat as __path_stat,
        files::mkdir as __path_mkdir,
        files::rename as __path_rename,
        files::remove as __path_remove,
        files::chmod as __path_chmod,
        files::symlink as __path_symlink,
        trees::pack as __path_pack,
        trees::unpack as __path_unpack,
        trees::watch as __path_watch,
        snapshots::take as __path_take,
        snapshots::list as __path_list,
        snapshots::get as __path_get,
        snapshots::delete as __path_delete,
        templates::list as __path_list,
        templates::get as __path_get,
        templates::delete as __path_delete,
        templates::build as __path_build,
        templates::builds as __path_builds,
        templates::get_build as __path_get_build,
        logs::build as __path_build,
        meta::version as __path_version,
        meta::document as __path_document,
        meta::metrics as __path_metrics,
    );
    let keyed = proxy::BY_PATH
        .iter()
        .fold(keyed, |router, path| router.route(path, routing::any(proxy::by_path)))
        .route_layer(middleware::from_fn_with_state(app.clone(), key::authorize));
    add!(keyed, meta::health as __path_health)
        .layer(middleware::from_fn_with_state(app.clone(), proxy::by_host))
        .layer(middleware::from_fn_with_state(app.clone(), observe::observe))
        .with_state(app)
}
