//! Small safe wrappers over Linux, and the only place (with one file of the guest) where `unsafe` is allowed.

pub mod netns;
pub mod pagemap;
pub mod process;
pub mod reflink;
pub mod socket;
pub mod sparse;
pub mod tap;
