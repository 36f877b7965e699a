//! The devices of a `keiki-vmm` guest, one file each.
//!
//! ```text
//!   vCPU threads                        event loop (main thread)
//!   MMIO, port I/O                      epoll: Device::events()
//!        │                                     │
//!        ▼                                     ▼
//!   Device::{read, write}               Device::process()
//!        └────────────── one Mutex per device ───────────┘
//!                              │
//!         Mmio<D>: registers, status, queues, interrupt (mmio.rs)
//!                              │ Rings: checked chains of guest memory (virtio.rs)
//!         D: block, net, console, rng, balloon (VirtioDevice)
//! ```
//!
//! To the monitor a device is a [`Device`]: registers, one descriptor to poll, and one lifecycle. A
//! virtio device implements [`virtio::VirtioDevice`] and is wrapped in [`mmio::Mmio`]. A device
//! works under its lock, either on a vCPU thread (registers; never blocks on a backend) or on the
//! event loop (queues and backends, all I/O). Devices have no threads: a paused device has nothing
//! in flight.
//!
//! | device | offers | deliberately absent |
//! |---|---|---|
//! | [`block`] | read, write, flush, discard, write zeroes, read-only, an id | several queues, resizing, `FUA` |
//! | [`net`] | checksum and TCP segmentation offload, both ways; merged buffers; link state | a control queue, several queues, vhost |
//! | [`console`] | one named port with flow control both ways | a terminal; more ports |
//! | [`rng`] | entropy of the host kernel, at a bounded rate | its own pool, which copies would share |
//! | [`balloon`] | free page reporting; a target to inflate to | statistics, hinting, page poison |
//! | [`serial`] | output into a log of bounded size and rate | input |
//! | [`vmgenid`] | tells a copy that it has become another machine | |
//! | [`power`] | off, reset | sleep |
//!
//! The transport ([`mmio`]) offers `VERSION_1`, indirect descriptors and event indices, but neither
//! packed rings nor the reset of a single queue. A fork cannot freeze devices with state outside
//! this process (vhost, vhost-user, virtio-fs, passthrough), so there are none.
//!
//! **State.** Each device saves plain data with its own kind and version ([`State`]); the state of
//! the transport wraps that of the device. The state repeats nothing that is in guest memory
//! (rings, waiting requests), and backends are not part of it: a thaw makes new devices on the
//! descriptors of the copy, restores them, and resumes them. A restore refuses a state with a field
//! that no such device can have, or with queues outside RAM; the error names the field. Version 1
//! states are seeds of the fuzz targets, and a test restores them.
//!
//! **System calls.** A jail must allow these calls of running devices: `read`, `write`, `recvfrom`,
//! `sendto`, `accept4`, `ppoll`, `epoll_ctl`, `epoll_pwait`, `preadv`, `pwritev`, `pread64`,
//! `pwrite64`, `fallocate`, `ftruncate`, `fsync`, `statx` or `fstat`, `fstatfs`, `fcntl`, `ioctl`
//! (on taps), `getrandom`, `timerfd_settime`; and to make devices also `eventfd2`, `epoll_create1`,
//! `timerfd_create`.
//!
//! This crate is independent of KVM: an interrupt is an [`Interrupt`], a queue notification an
//! eventfd, and [`balloon::Discard`] frees memory. It opens no path: files, taps and sockets arrive
//! as descriptors.
//!
//! The guest is hostile. Its requests first become typed values ([`virtio::Chain`],
//! `block::Request`), with every address checked against RAM and every length bounded, before
//! anything else happens. Log lines that it can cause are limited ([`limit::Limit`]).
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
