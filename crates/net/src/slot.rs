//! Builds and removes one slot.
//!
//! A slot is a pure function of its index: names, addresses and rules follow from the index and the
//! node's configuration. So an adopted slot can be completed and a half-built one removed without
//! any record. A slot is never reused: its namespace goes with taps, queues, counters and
//! connection table, and the host forgets the connections of its address.
//!
//! All steps of a build run on their own thread, because a namespace belongs to a thread: it
//! starts in the host's namespace, enters the slot's, and ends.

use crate::{
    error::{Error, Result},
    netfilter,
    netlink::Net,
    range::{NodeTag, Range},
    rules::{self, EgressPolicy, UPLINK},
};
use keiki_protocol::net::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, PREFIX, TAP};
use keiki_sys::{netns, tap};
use std::{
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    os::fd::OwnedFd,
    time::Instant,
};

/// MTU if the host has no default route.
const DEFAULT_MTU: u32 = 1500;

/// What all slots of a node have in common.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) tag: NodeTag,
    pub(crate) range: Range,
    pub(crate) egress: EgressPolicy,
}

/// The name server's sockets, opened inside the slot.
pub(crate) struct Sockets {
    pub(crate) udp: UdpSocket,
    pub(crate) tcp: TcpListener,
}

/// Whether the slot is new or belongs to a machine that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    New,
    Adopted,
}

impl Plan {
    /// Builds slot `index`, or completes it. Blocks. On error a new slot leaves nothing behind.
    pub(crate) fn build(&self, index: u16, origin: Origin) -> Result<Sockets> {
        let clock = Instant::now();
        let built = on_own_runtime(|| self.equip(index, origin));
        tracing::debug!(index, ?origin, ok = built.is_ok(), took = ?clock.elapsed(), "slot built");
        if built.is_err() && origin == Origin::New {
            let removed = on_own_runtime(|| async { self.take_down(&Net::open()?, index).await });
            if let Err(error) = removed {
                tracing::warn!(
                    index,
                    error = &error as &dyn std::error::Error,
                    "a half-built slot could not be removed"
                );
            }
        }
        built
    }

    async fn equip(&self, index: u16, origin: Origin) -> Result<Sockets> {
        let name = self.tag.netns(index);
        let outer = self.tag.link(index);
        let (host_end, slot_end) = (self.range.host_end(index), self.range.slot_end(index));
        let home = netns::current().map_err(Error::io("open the host's network namespace"))?;
        let host = Net::open()?;
        let exit = host.exit().await?;
        let mtu = exit.as_ref().map_or(DEFAULT_MTU, |exit| exit.mtu);

        match origin {
            // The name may be left from a namespace that another process unmounted.
            Origin::New => {
                netns::remove(&name).map_err(Error::io(format!("clear the name {name}")))?;
                netns::create(&name).map_err(Error::io(format!("create the namespace {name}")))?;
            }
            Origin::Adopted => {
                let there = netns::open(&netns::path(&name)).map_err(|_| Error::Gone(index))?;
                netns::enter(&there).map_err(Error::io(format!("enter the namespace {name}")))?;
            }
        }
        let slot = Net::open()?;
        // IPv6 off before there is any link that could get an address.
        for key in ["ipv6/conf/all/disable_ipv6", "ipv6/conf/default/disable_ipv6"] {
            sysctl(key, "1", Missing::Fine)?;
        }
        // Refusals are ICMP errors to the guest. The rules limit them; the default limit is one per
        // second.
        sysctl("ipv4/icmp_ratelimit", "0", Missing::Error)?;
        if slot.link(TAP).await?.is_none() {
            tap::open(TAP).and_then(|tap| tap::persist(&tap)).map_err(Error::io("create the tap device"))?;
        }
        if slot.link(UPLINK).await?.is_none() || host.link(&outer).await?.is_none() {
            slot.remove_link(UPLINK).await?;
            host.remove_link(&outer).await?;
            slot.add_pair(UPLINK, &outer, &home, mtu).await?;
        }
        // The rules are applied before any link is up: there is no moment without them.
        rules::apply(&name, &rules::slot(&self.egress))?;
        let link = slot.bring_up(TAP, Some(mac(GATEWAY_MAC)), mtu, (GATEWAY, PREFIX)).await?;
        slot.fix_neighbour(link, GUEST, mac(GUEST_MAC)).await?;
        slot.bring_up(UPLINK, None, mtu, (slot_end, 30)).await?;
        sysctl("ipv4/ip_forward", "1", Missing::Error)?;
        let sockets = Sockets {
            udp: UdpSocket::bind((GATEWAY, 53)).map_err(Error::io("open the slot's name server"))?,
            tcp: TcpListener::bind((GATEWAY, 53)).map_err(Error::io("open the slot's name server"))?,
        };

        self.open_host_side(&home, &host, &outer, host_end, mtu).await?;
        if let Some(exit) = exit {
            forward(&exit.link)?;
        }
        slot.default_route(host_end).await?;
        Ok(sockets)
    }

    /// Brings the thread back into the host's namespace.
    async fn open_host_side(
        &self,
        home: &OwnedFd,
        host: &Net,
        outer: &str,
        address: Ipv4Addr,
        mtu: u32,
    ) -> Result<()> {
        netns::enter(home).map_err(Error::io("return to the host's network namespace"))?;
        sysctl(&format!("ipv6/conf/{outer}/disable_ipv6"), "1", Missing::Fine)?;
        sysctl(&format!("ipv4/conf/{outer}/rp_filter"), "1", Missing::Error)?;
        forward(outer)?;
        host.bring_up(outer, None, mtu, (address, 30)).await?;
        Ok(())
    }

    /// Removes slot `index`, whole or half. It is not an error if it is already gone. The sockets
    /// of its name server must be closed.
    pub(crate) async fn take_down(&self, host: &Net, index: u16) -> Result<()> {
        // The link first, by name: the kernel removes a namespace some time after its last user.
        host.remove_link(&self.tag.link(index)).await?;
        let (name, outside) = (self.tag.netns(index), self.range.slot_end(index));
        tokio::task::spawn_blocking(move || {
            netns::remove(&name).map_err(Error::io(format!("remove the namespace {name}")))?;
            netfilter::forget(outside).map_err(Error::io("remove the slot's connection entries"))
        })
        .await
        .map_err(|error| Error::io("remove a slot")(error.into()))?
    }
}

/// Runs `work` on a new thread with its own runtime, and waits for it.
pub(crate) fn on_own_runtime<T: Send, F: Future<Output = Result<T>>>(
    work: impl FnOnce() -> F + Send,
) -> Result<T> {
    netns::on_own_thread(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(async { work().await }))
    })
    .map_err(Error::io("run a slot's thread"))?
}

/// Lets the host forward what arrives on this link: packets of a slot, or answers to them. Per
/// link, so that Keiki does not turn the host into a router between its other networks.
pub(crate) fn forward(link: &str) -> Result<()> {
    sysctl(&format!("ipv4/conf/{link}/forwarding"), "1", Missing::Error)
}

#[derive(PartialEq, Eq)]
enum Missing {
    Fine,
    Error,
}

/// Sets a sysctl of the calling thread's network namespace.
fn sysctl(key: &str, value: &str, missing: Missing) -> Result<()> {
    let path = format!("/proc/sys/net/{key}");
    // Each write of `forwarding` would flush the host's route cache.
    if std::fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    match std::fs::write(&path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && missing == Missing::Fine => Ok(()),
        done => done.map_err(Error::io(format!("set {path} to {value}"))),
    }
}

/// Parses the MAC constants of the protocol; a test checks their form.
fn mac(text: &str) -> [u8; 6] {
    let mut bytes = [0; 6];
    for (byte, part) in bytes.iter_mut().zip(text.split(':')) {
        *byte = u8::from_str_radix(part, 16).unwrap_or_default();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constants_are_macs() {
        assert_eq!(mac(GUEST_MAC), [0x06, 0x4b, 0x49, 0x4b, 0, 2]);
        assert_eq!(mac(GATEWAY_MAC), [0x06, 0x4b, 0x49, 0x4b, 0, 1]);
    }
}
