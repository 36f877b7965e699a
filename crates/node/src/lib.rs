//! `keiki node`: one daemon that owns the sandboxes, templates and snapshots of a host.
//!
//! [`Node`] is all of it except HTTP: every verb of `/v1` is one method here, and
//! [`keiki_api::Api`] is what HTTP sees of it.

mod admission;
mod births;
mod config;
mod daemon;
mod entry;
mod error;
mod events;
mod fleet;
mod freeze;
mod guest;
mod journal;
mod key;
mod lifecycle;
mod locks;
mod memory;
mod metrics;
mod network;
mod observe;
mod once;
mod records;
mod recovery;
mod sandbox;
mod sandboxes;
mod stale;
mod start;
mod store;
mod sweep;
mod templates;
mod timings;
mod verbs;

#[cfg(test)]
mod tests;

pub use config::Config;
pub use daemon::Node;
pub use error::{Error, Result};
pub use keiki_net::Check as NetworkCheck;
pub use keiki_types::Sharing;

/// What a network of slots in this range needs from the host, for `doctor`. It removes what it
/// creates for the test. Blocks.
#[must_use]
pub fn network_checks(range: keiki_net::Cidr) -> Vec<NetworkCheck> {
    keiki_net::check(range, None)
}

/// Does KVM run guests at the speed of the processor here, and a sentence about it, for `doctor`. Asks the monitor at
/// `vmm`. Blocks.
#[must_use]
pub fn kvm_check(vmm: &std::path::Path) -> (bool, String) {
    keiki_engine::kvm::is_native(vmm)
}
