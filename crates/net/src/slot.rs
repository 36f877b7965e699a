//! Building one slot, and taking it down.
//!
//! A slot is a pure function of its index: names, addresses and rules follow from the index and the node's
//! configuration, so that an adopted slot can be completed, a half-built one removed, and nothing needs to be
//! written down. A recycled slot is a new one: the namespace with its taps, queues, counters and connection
//! table goes, and the host's connection entries of its address are removed.
//!
//! All steps run on one thread made for the build, because a namespace belongs to a thread: it starts in the
//! host's, moves into the slot's, and ends.

use crate::{
    cidr::{NodeTag, Range},
    error::{Error, Result},
    netfilter,
    netlink::Net,
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

/// MTU where the host has no way out.
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

/// Is the slot new, or that of a machine that runs?
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
                    "half-built slot not removed"
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
            // The name may be a remnant of a namespace that was unmounted by other hands.
            Origin::New => {
                netns::remove(&name).map_err(Error::io(format!("clear the name {name}")))?;
                netns::create(&name).map_err(Error::io(format!("make the namespace {name}")))?;
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
        // Refusals are ICMP errors to the guest; the rules limit them, not the one a second of the default.
        sysctl("ipv4/icmp_ratelimit", "0", Missing::Error)?;
        if slot.link(TAP).await?.is_none() {
            tap::open(TAP).and_then(|tap| tap::persist(&tap)).map_err(Error::io("make the tap"))?;
        }
        if slot.link(UPLINK).await?.is_none() || host.link(&outer).await?.is_none() {
            slot.remove_link(UPLINK).await?;
            host.remove_link(&outer).await?;
            slot.add_pair(UPLINK, &outer, &home, mtu).await?;
        }
        // The rules go in before anything is up: there is no moment without them.
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

    /// From here on the thread is in the host's namespace again.
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

    /// Removes slot `index`, whole or half. Gone already: no error. Its name server's sockets must be closed.
    pub(crate) async fn take_down(&self, host: &Net, index: u16) -> Result<()> {
        // The link first, by name: the kernel ends a namespace some time after its last user.
        host.remove_link(&self.tag.link(index)).await?;
        let (name, outside) = (self.tag.netns(index), self.range.slot_end(index));
        tokio::task::spawn_blocking(move || {
            netns::remove(&name).map_err(Error::io(format!("remove the namespace {name}")))?;
            netfilter::forget(outside)
                .map_err(Error::io("remove the slot's entries from the connection table"))
        })
        .await
        .map_err(|error| Error::io("take down a slot")(error.into()))?
    }
}

/// Runs `work` on a new thread with a runtime of its own, and waits.
pub(crate) fn on_own_runtime<T: Send, F: Future<Output = Result<T>>>(
    work: impl FnOnce() -> F + Send,
) -> Result<T> {
    netns::on_own_thread(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(async { work().await }))
    })
    .map_err(Error::io("run a slot's thread"))?
}

/// Lets the host forward what comes in by this link: what a slot sends, or an answer to it. Per link, so that
/// Keiki does not turn a host with other networks into a router between them.
pub(crate) fn forward(link: &str) -> Result<()> {
    sysctl(&format!("ipv4/conf/{link}/forwarding"), "1", Missing::Error)
}

#[derive(PartialEq, Eq)]
enum Missing {
    Fine,
    Error,
}

/// Sets a value of the calling thread's network namespace.
fn sysctl(key: &str, value: &str, missing: Missing) -> Result<()> {
    let path = format!("/proc/sys/net/{key}");
    // Writing forwarding again would flush the host's route cache each time.
    if std::fs::read_to_string(&path).is_ok_and(|now| now.trim() == value) {
        return Ok(());
    }
    match std::fs::write(&path, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && missing == Missing::Fine => Ok(()),
        done => done.map_err(Error::io(format!("set {path} to {value}"))),
    }
}

/// Reads the MAC constants of the protocol; a test holds them to their form.
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
