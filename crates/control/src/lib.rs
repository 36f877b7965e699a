//! The messages between node and monitor over the control socket (RFD 006).
//!
//! ```text
//!   node                                               keiki-vmm
//!   Client::call(request, descriptors) ── packet ──>   Server::receive
//!                                     <── packet ──    Server::answer
//! ```
//!
//! A packet of a `SOCK_SEQPACKET` socket is one message: a header that never changes ([`packet`]),
//! then postcard. Each request has one reply, and only the node asks. Only requests carry
//! descriptors, each with a [`Role`] that identifies it. [`Request::wants`] lists the required and
//! the optional roles of a request. A request with other roles is refused before it reaches the
//! monitor. An error closes every received descriptor, and all of them are close-on-exec.
//!
//! How long a monitor lives depends on what it is. A blank and a zygote hold one end of a socket
//! pair and end when the node closes the other. A machine outlives the node: it holds a listener
//! that the node made at a path, and a later node process connects to the same path.
//!
//! A machine that cannot continue, or whose guest has ended, appends a line that starts with
//! [`EXIT_REASON`] to its console log before it exits. The node that reads it may not be its
//! parent, so it cannot read an exit status.

mod connection;
mod descriptors;
mod error;
mod message;
pub mod packet;
mod pages;
mod role;
mod start;

/// Version of the messages. Node and monitor must have the same.
pub const VERSION: u32 = 3;

/// Starts the line in which a machine reports why it ends, for example `keiki-vmm: guest-shutdown`.
pub const EXIT_REASON: &str = "keiki-vmm: ";

pub use connection::{Answer, Client, Server, accept, listen};
pub use descriptors::Descriptors;
pub use error::{ControlError, Result};
pub use message::{
    Boot, Cpu, Devices, Disk, FailureKind, Frozen, Hello, Load, Persisted, Reply, Request, Shape, Stage,
    Step, Thaw, Thawed,
};
pub use pages::Pages;
pub use role::{MAX_DISKS, Role, Want};
pub use start::Start;
