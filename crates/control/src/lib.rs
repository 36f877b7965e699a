//! What a node and a monitor say to each other over the control socket (RFD 006).
//!
//! ```text
//!   node                                               keiki-vmm
//!   Client::call(request, descriptors) ── packet ──>   Server::receive
//!                                     <── packet ──    Server::answer
//! ```
//!
//! A packet of a `SOCK_SEQPACKET` socket is one message: a header that never changes ([`packet`]), then postcard.
//! One request, one reply, and only the node asks. Descriptors travel with requests alone, each with the [`Role`]
//! that says what it is; [`Request::wants`] says which roles a request must and may have, and a request with others
//! is refused before anybody sees it. Nothing received outlives an error: every descriptor is closed, and all are
//! close-on-exec.
//!
//! How long a monitor lives depends on what it is. A blank and a zygote hold one end of a socket pair and end with
//! it: nothing of them is left when the node goes. A machine holds a listener that the node made for it at a path,
//! and goes on; a later node process connects to the same path.
//!
//! A machine that cannot go on, or whose guest has ended, appends a line that begins with [`EXIT_REASON`] to its console
//! log before its process ends: the node that reads it need not be its parent, so there is no exit status to read.

mod connection;
mod descriptors;
mod error;
mod message;
pub mod packet;
mod pages;
mod role;
mod start;

/// Version of the messages. Node and monitor must have the same.
pub const VERSION: u32 = 4;

/// Starts the line in which a machine reports why it ends, for example `keiki-vmm: guest-shutdown`.
pub const EXIT_REASON: &str = "keiki-vmm: ";

pub use connection::{Answer, Client, Server, accept, listen};
pub use descriptors::Descriptors;
pub use error::{ControlError, Result};
pub use message::{
    Boot, Devices, Disk, FailureKind, Frozen, Hello, Load, Persisted, Reply, Request, Shape, Stage, Step,
    Thaw, Thawed,
};
pub use pages::Pages;
pub use role::{MAX_DISKS, Role, Want};
pub use start::Start;
