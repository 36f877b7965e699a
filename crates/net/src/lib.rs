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
//! What it does to the host: one nftables table `keiki_TAG` (made again when another firewall flushes it), the
//! claim route, one link per slot, and `net.ipv4.conf.LINK.forwarding=1` for those links and for the link of the
//! default route. The last stays on when the node stops: another node may need it. The global `ip_forward` is not
//! touched, so a host between other networks does not become a router for them. Networks allowed by an
//! [`EgressPolicy`] that lie behind another link need forwarding there too, by whoever manages that link.
//!
//! Everything is netlink but the rulesets, which `nft` applies while a slot is built ahead.

mod check;
mod cidr;
mod dns;
mod error;
mod host;
mod netfilter;
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
