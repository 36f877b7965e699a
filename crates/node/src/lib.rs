//! `keiki node`: one daemon that owns the sandboxes, templates and snapshots of a host.
//!
//! [`Node`] is the whole of it without HTTP: every verb of `/v1` is one method here. [`http`] turns requests
//! into these calls and nothing else.

mod admission;
pub mod clock;
pub mod dial;
pub mod error;
pub mod exec;
pub mod files;
mod guest;
pub mod http;
mod lifecycle;
mod node;
mod records;
mod sandbox;
mod store;
pub mod trees;
mod upload;

pub use error::{Error, Result};
pub use keiki_net::Check as NetworkCheck;
pub use node::{Config, Node};

/// What a network of slots in this range needs of the host, for `doctor`. What it makes to
/// try, it removes. Blocks.
#[must_use]
pub fn network_checks(range: keiki_net::Cidr) -> Vec<NetworkCheck> {
    keiki_net::check(range, None)
}
