//! Small safe wrappers over what Linux offers and safe libraries do not: the only crate beside the guest
//! agent in which `unsafe` is allowed, each use with its reason.
#![allow(unsafe_code)]

pub mod failpoint;
pub mod files;
pub mod heap;
pub mod host;
pub mod jail;
pub mod netns;
pub mod pages;
pub mod process;
pub mod sparse;
pub mod tap;
pub mod tsc;
