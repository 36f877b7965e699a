//! keiki-vmm, the monitor whose fork is fork(2).
//!
//! ```text
//!   main thread   poll: control socket ── requests ──> freeze, thaw, persist, pause ...
//!                       device events  ── DeviceManager ──> backends, queues
//!   vCPU threads  KVM_RUN ── access ── Bus ──────────> device registers
//! ```
//!
//! - **Freeze**: flush the disk, park the vCPUs, pause the devices, save the state of both, fork,
//!   put a new top layer on the disk, resume. The copy is a zygote: guest memory and a few hundred
//!   KiB of state, with every other descriptor closed.
//! - **Thaw**: fork the zygote. The copy makes a new virtual machine over the same memory and new
//!   devices on its own descriptors, restores their state, and runs.
//! - **Persist**: a copy of the zygote writes its private pages and the state to files.
//! - **Load**: a blank monitor maps `vm.mem` and becomes a zygote.
//!
//! The monitor opens no path. The node opens files and sends their descriptors ([`keiki_control`]).

pub mod boot;
pub mod device_manager;
mod error;
mod exit;
mod fds;
pub mod frozen;
pub mod jail;
pub mod machine;
pub mod probe;
pub mod process;
mod working_set;
pub mod zygote;

pub use error::{Error, Result};
pub use exit::EXIT_START;
