//! What a guest of keiki-vmm sees: one file for each device.
//!
//! ```text
//!   vCPU threads                        event loop (main thread)
//!   MMIO, port I/O                      epoll: Device::events()
//!        │                                     │
//!        ▼                                     ▼
//!   Device::{read, write}               Device::process()
//!        └────────────── one Mutex for each device ──────┘
//!                              │
//!         Mmio<D>: registers, status, queues, interrupt (mmio.rs)
//!                              │ Rings: checked chains of guest memory (virtio.rs)
//!         D: block, net, console, rng, balloon (VirtioDevice)
//! ```
//!
//! The monitor knows a device as [`Device`]: registers, one descriptor to poll, and one lifecycle. A virtio device
//! is written against [`virtio::VirtioDevice`] and wrapped in [`mmio::Mmio`]. Everything a device does happens under its
//! lock, either on a vCPU thread (registers; never blocks on a backend) or on the event loop (queues and backends, all
//! I/O). There is no thread of a device: a device that is paused has nothing in flight.
//!
//! Nothing here knows KVM. An interrupt is [`Interrupt`], a queue notification an eventfd, memory that is given back
//! [`balloon::Discard`]. No path is ever opened: files, taps and sockets arrive as descriptors.
//!
//! The guest is hostile. Its requests become typed values first ([`virtio::Chain`], `block::Request`), with every
//! address checked against RAM and every length bounded, and only then something happens. What it can make a device
//! log is limited ([`limit::Limit`]).
#![forbid(unsafe_code)]

pub mod balloon;
pub mod block;
pub mod console;
pub mod console_log;
pub mod device;
pub mod disk;
pub mod limit;
pub mod mmio;
pub mod net;
pub mod power;
pub mod rng;
pub mod serial;
pub mod virtio;
pub mod vmgenid;
mod watch;

pub use device::{Device, Event, Interrupt, Memory, State, StateError};
