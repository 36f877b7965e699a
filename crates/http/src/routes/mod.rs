//! The routes of the API, one file for each kind of thing.

mod events;
mod exec;
mod execs;
mod files;
mod fork;
mod logs;
mod meta;
mod ports;
mod pty;
mod sandboxes;
mod snapshots;
mod tcp;
mod templates;
mod trees;

use crate::{App, document};
use utoipa_axum::{router::OpenApiRouter, routes};

/// Routes that need a key.
pub(crate) fn keyed() -> OpenApiRouter<App> {
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

/// Routes that need no key.
pub(crate) fn open() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(meta::health))
}
