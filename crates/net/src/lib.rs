//! Network slots: a network for each sandbox, built ahead.
//!
//! Every guest has the same address, MAC and tap name, so that any copy of a frozen machine fits
//! any slot. The slot around it makes it distinct:
//!
//! ```text
//!   guest 172.31.255.2 ── tap0 172.31.255.1 │ NAT │ up0 10.200.x.y+2 ═══ kk-TAG-N 10.200.x.y+1 │ NAT │ internet
//!                         └──────── namespace keiki-TAG-N ─────────┘     └───────── host ──────┘
//! ```
//!
//! - [`Slots`] builds slots ahead, hands them out and removes them.
//! - `rules` holds the firewall rules, `dns` the name server at the gateway.
//! - Names follow from the node's tag and the slot's index, so a node finds the slots of an earlier
//!   run without any record. An unreachable route claims the range against other nodes.
//!
//! On the host it makes one nftables table `keiki_TAG` (created again when another firewall flushes
//! it), the claim route, one link per slot, and sets `net.ipv4.conf.LINK.forwarding=1` for those
//! links and for the link of the default route. The last one stays set when the node stops, because
//! another node may need it. It does not touch the global `ip_forward`, so the host does not become
//! a router between its other networks. If an [`EgressPolicy`] allows networks behind another link,
//! forwarding must be on for that link too; its owner sets that.
//!
//! Everything goes over netlink, except rulesets: `nft` applies them while a slot is built ahead.

mod check;
mod cidr;
mod dns;
mod error;
mod host;
mod netfilter;
mod netlink;
mod range;
mod rules;
mod slot;
mod slots;

pub use check::{Check, check};
pub use cidr::{Cidr, CidrError};
pub use error::{Error, Result};
pub use host::purge;
pub use range::NodeTag;
pub use rules::EgressPolicy;
pub use slots::{Slot, Slots, SlotsConfig};
