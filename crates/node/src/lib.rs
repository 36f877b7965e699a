//! `keiki node`: one daemon that owns the sandboxes, templates and snapshots of a host.
//!
//! [`Node`] is the whole of it without HTTP: every verb of `/v1` is one method here. [`http`] turns requests
//! into these calls and nothing else.

mod admission;
pub mod clock;
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

pub use error::{Error, Result};
pub use node::{Config, Node};
