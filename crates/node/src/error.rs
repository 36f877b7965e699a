//! Errors of the node are those of its API.

pub use keiki_api::{Error, Result};
