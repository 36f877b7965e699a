//! Network slots: a pre-built network home for each sandbox.
//!
//! Every guest has the same address, MAC and tap name, so that any descendant of one frozen machine fits any
//! slot. The slot around it makes it distinct:
//!
//! ```text
//!   guest 172.31.255.2 ── tap0 172.31.255.1 │ NAT │ up0 10.200.x.y+2 ═══ kk-TAG-N 10.200.x.y+1 │ NAT │ internet
//!                         └──────── namespace keiki-TAG-N ─────────┘     └───────── host ──────┘
//! ```
//!
//! - [`Slots`] keeps some slots built ahead, hands them out, and takes them down.
//! - The rules of what may pass are in `rules`; the name server at the gateway is in `dns`.
//! - Names follow from the node's tag and the slot's index, so that a node finds what an earlier run of it left
//!   without having written anything down; an unreachable route claims its range against other nodes.
//!
//! Everything is netlink but the rulesets, which `nft` applies while a slot is built ahead.

mod check;
mod cidr;
mod conntrack;
mod dns;
mod error;
mod host;
mod netlink;
mod rules;
mod slot;
mod slots;

pub use check::{Check, check};
pub use cidr::{Cidr, CidrError, NodeTag};
pub use error::{Error, Result};
pub use host::purge;
pub use rules::EgressPolicy;
pub use slots::{Slot, Slots, SlotsConfig};
