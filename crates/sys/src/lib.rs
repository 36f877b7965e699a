//! Small safe wrappers over what Linux offers and safe libraries do not, and a few types that every
//! other crate uses. Each `unsafe` block states why it is sound.
#![allow(unsafe_code)]

pub mod bucket;
mod error;
pub mod failpoint;
pub mod files;
pub mod frame;
pub mod heap;
pub mod host;
pub mod jail;
pub mod maps;
pub mod netns;
pub mod pages;
pub mod process;
pub mod sparse;
pub mod stopwatch;
pub mod tap;
pub mod tsc;

pub use error::error_chain;
