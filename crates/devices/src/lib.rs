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
//! | device | offers | deliberately not |
//! |---|---|---|
//! | [`block`] | read, write, flush, discard, write zeroes, read-only, an id | several queues, resizing, `FUA` by itself |
//! | [`net`] | checksum and TCP segmentation left to the other side, both ways; merged buffers; link state | a control queue, several queues, vhost |
//! | [`console`] | one named port with flow control both ways | a terminal; more ports |
//! | [`rng`] | the host kernel's entropy, at a bounded rate | a pool of its own, which copies would share |
//! | [`balloon`] | free page reporting; a target to inflate to | statistics, hinting, page poison |
//! | [`serial`] | output into a log of bounded size and rate | input |
//! | [`vmgenid`] | tells a copy that it is another machine | |
//! | [`power`] | off, reset | sleep |
//!
//! The transport ([`mmio`]) offers `VERSION_1`, indirect descriptors and event indices; not packed rings, nor resetting
//! one queue. Devices with state outside of this process (vhost, vhost-user, virtio-fs, passthrough) cannot be frozen by
//! a fork and are not there.
//!
//! **State.** Each device saves plain data with a kind and a version of its own ([`State`]), the transport's around the
//! device's. What is in guest memory (rings, requests that wait) is not repeated in it. Backends are not part of it: a
//! thaw makes new devices on descriptors of the copy, restores, and resumes. A state is taken only if every field of it is
//! one that a device of this shape can have, and if what it says of queues is within RAM; the error names the field. Version 1
//! states are kept as seeds of the fuzz targets, and a test takes them.
//!
//! **System calls.** Running devices make these, and a jail has to allow them: `read`, `write`, `recvfrom`, `sendto`,
//! `accept4`, `ppoll`, `epoll_ctl`, `epoll_pwait`, `preadv`, `pwritev`, `pread64`, `pwrite64`, `fallocate`, `ftruncate`,
//! `fsync`, `statx` or `fstat`, `fstatfs`, `fcntl`, `ioctl` (of taps), `getrandom`, `timerfd_settime`; making them also `eventfd2`,
//! `epoll_create1`, `timerfd_create`.
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
