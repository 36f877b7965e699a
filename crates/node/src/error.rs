//! The node's errors are the API's.

pub use keiki_api::{Error, Result};
