//! The protocol between a node and the agent in its guests: the RPC schema, the handshake and the
//! release gate before it, and the constants that are the same in every guest (address, MAC, port
//! name), so that any copy of a frozen machine fits any slot.

#[cfg(feature = "client")]
pub mod client;
pub mod gate;
pub mod handshake;
pub mod seal;
pub mod secrets;

/// Generated from `proto/guest.proto`; `tests/schema.rs` says how.
#[allow(missing_docs, clippy::all, clippy::wildcard_imports)]
pub mod guest {
    include!("../proto/guest.rs.in");
}

/// Name of the virtio-console port that carries the agent connection.
pub const AGENT_PORT: &str = "keiki.agent.0";

/// Calls at once over one connection. The window of the connection is the sum of the windows of its
/// calls, so a call that is not read does not block others.
pub const MAX_CALLS: u32 = 512;

/// The VM generation ID of a guest whose monitor has no device for it, as with engine `qemu`. The
/// agent provides it.
pub mod generation {
    /// Its address in guest memory: a page that the kernel must not use.
    pub const ADDRESS: u64 = 0x9e000;
    /// The kernel argument that reserves the page.
    pub const RESERVED: &str = "memmap=4K$0x9e000";
    /// Its length in bytes.
    pub const LEN: usize = 16;
    /// The ACPI device that holds its address. Reading the status of the device announces a change.
    pub const DEVICE: &str = "KEIK0002";
}

/// The network as every guest sees it. The slot around a guest makes it distinct outside.
pub mod net {
    use std::net::Ipv4Addr;

    /// The guest's address.
    pub const GUEST: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 2);
    /// The slot's gateway: default route and name server of the guest.
    pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 1);
    /// Prefix length of the link between the two.
    pub const PREFIX: u8 = 30;
    /// The guest's MAC address (locally administered).
    pub const GUEST_MAC: &str = "06:4b:49:4b:00:02";
    /// The gateway's MAC address: constant, so that neighbour entries stay valid in a copy.
    pub const GATEWAY_MAC: &str = "06:4b:49:4b:00:01";
    /// Name of the tap device inside each slot's namespace.
    pub const TAP: &str = "tap0";
}
