//! What a node and the agent in its guests agree on: the RPC schema, the handshake and the release gate before it, and
//! the constants that make every guest alike (address, MAC, port name), so that any descendant of one frozen
//! machine fits any slot.

#[cfg(feature = "client")]
pub mod client;
pub mod gate;
pub mod handshake;
pub mod seal;
pub mod secrets;

/// The generated schema of `proto/guest.proto`.
#[allow(missing_docs, clippy::all, clippy::wildcard_imports)]
pub mod guest {
    tonic::include_proto!("keiki.guest.v1");
}

/// Name of the virtio-console port that carries the agent connection.
pub const AGENT_PORT: &str = "keiki.agent.0";

/// Calls at once over one connection. Each side's window for all of them together is what each of them may
/// have: calls that nobody reads hold up no others.
pub const MAX_CALLS: u32 = 512;

/// The VM generation ID of a guest whose monitor has no device for it: of engine `qemu`. The agent keeps it.
pub mod generation {
    /// Where it is in the guest's memory: a page that the kernel is told to leave alone.
    pub const ADDRESS: u64 = 0x9e000;
    /// The kernel's argument for that.
    pub const RESERVED: &str = "memmap=4K$0x9e000";
    /// Its bytes.
    pub const LEN: usize = 16;
    /// The ACPI device that tells where it is, and whose status is asked for when it has changed.
    pub const DEVICE: &str = "KEIK0002";
}

/// What every guest believes about its network. The slot around it makes it distinct outside.
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
    /// The gateway's MAC address: constant, so that a restored neighbour entry stays right.
    pub const GATEWAY_MAC: &str = "06:4b:49:4b:00:01";
    /// Name of the tap device inside each slot's namespace.
    pub const TAP: &str = "tap0";
}
