//! keiki-vmm, the monitor whose fork is fork(2).
//!
//! ```text
//!   main thread   poll: control socket ── requests ──> freeze, thaw, persist, pause ...
//!                       device events  ── Board ─────> backends, queues
//!   vCPU threads  KVM_RUN ── access ── Bus ──────────> registers of devices
//! ```
//!
//! A **freeze**: flush the disk; park the vCPUs; stop the devices; save both; fork; put a new top on the disk; let
//! both go on. The copy is a zygote: guest memory and a few hundred KiB of state, every other descriptor closed.
//! A **thaw**: fork the zygote; in the copy a new virtual machine over the same memory, devices anew from descriptors of
//! its own, state into both; run. **Persist**: the zygote writes what is private. **Load**: a blank maps `vm.mem` and is
//! a zygote.
//!
//! Nothing here opens a path. The node opens, and sends descriptors ([`keiki_control`]).

pub mod board;
pub mod boot;
mod error;
pub mod frozen;
pub mod jail;
pub mod machine;
mod pages;
pub mod probe;
pub mod process;
pub mod zygote;

pub use error::{Error, Result};
