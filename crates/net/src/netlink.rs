//! The few rtnetlink requests that slots need, each one call. A [`Net`] works in the network
//! namespace of the thread that opened it, wherever it is used later.

use crate::{
    cidr::Cidr,
    error::{Error, Result},
    range::NodeTag,
};
use futures::TryStreamExt;
use rtnetlink::{
    LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        link::{InfoData, InfoKind, InfoVeth, LinkAttribute},
        neighbour::NeighbourState,
        route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
    },
};
use std::{
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsRawFd, OwnedFd},
};
use tokio::task::JoinHandle;

/// Marks the routes that claim a range (a free number of `rtm_protocol`).
const CLAIM_PROTOCOL: RouteProtocol = RouteProtocol::Other(0x6b);

/// A netlink connection to one namespace.
pub(crate) struct Net {
    handle: rtnetlink::Handle,
    connection: JoinHandle<()>,
}

/// Where traffic to the internet leaves the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exit {
    pub(crate) link: String,
    pub(crate) mtu: u32,
}

/// A route of the host, as far as a slot range is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) to: Cidr,
    pub(crate) metric: u32,
    pub(crate) link: Option<u32>,
    /// The node whose range it claims.
    pub(crate) claim: Option<NodeTag>,
}

impl Drop for Net {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Net {
    /// Opens a connection to the calling thread's namespace, served by the current runtime.
    pub(crate) fn open() -> Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(Error::io("open netlink"))?;
        Ok(Self { handle, connection: tokio::spawn(connection) })
    }

    /// Index of the link called `name`.
    pub(crate) async fn link(&self, name: &str) -> Result<Option<u32>> {
        let mut links = self.handle.link().get().match_name(name.to_owned()).execute();
        match links.try_next().await {
            Ok(link) => Ok(link.map(|link| link.header.index)),
            Err(error) if is(&error, rustix::io::Errno::NODEV) => Ok(None),
            Err(error) => Err(Error::netlink(format!("look up {name}"))(error)),
        }
    }

    /// Index, name and MTU of all links.
    pub(crate) async fn links(&self) -> Result<Vec<(u32, String, u32)>> {
        let mut links = self.handle.link().get().execute();
        let mut found = Vec::new();
        while let Some(link) = links.try_next().await.map_err(Error::netlink("list links"))? {
            let (mut name, mut mtu) = (String::new(), 1500);
            for attribute in link.attributes {
                match attribute {
                    LinkAttribute::IfName(value) => name = value,
                    LinkAttribute::Mtu(value) => mtu = value,
                    _ => {}
                }
            }
            found.push((link.header.index, name, mtu));
        }
        Ok(found)
    }

    /// Removes a link. It is not an error if it is already gone.
    pub(crate) async fn remove_link(&self, name: &str) -> Result<()> {
        let Some(index) = self.link(name).await? else { return Ok(()) };
        match self.handle.link().del(index).execute().await {
            Err(error) if !is(&error, rustix::io::Errno::NODEV) => {
                Err(Error::netlink(format!("remove {name}"))(error))
            }
            _ => Ok(()),
        }
    }

    /// Creates a veth pair: `name` here and `peer` in another namespace.
    pub(crate) async fn add_pair(&self, name: &str, peer: &str, there: &OwnedFd, mtu: u32) -> Result<()> {
        let far = LinkMessageBuilder::<LinkUnspec>::new()
            .name(peer.to_owned())
            .mtu(mtu)
            .setns_by_fd(there.as_raw_fd())
            .build();
        let pair = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
            .name(name.to_owned())
            .mtu(mtu)
            .set_info_data(InfoData::Veth(InfoVeth::Peer(far)))
            .build();
        self.handle
            .link()
            .add(pair)
            .execute()
            .await
            .map_err(Error::netlink(format!("create the link {peer}")))
    }

    /// Sets MAC (where given) and MTU of a link and brings it up with one address.
    pub(crate) async fn bring_up(
        &self,
        name: &str,
        mac: Option<[u8; 6]>,
        mtu: u32,
        (address, prefix): (Ipv4Addr, u8),
    ) -> Result<u32> {
        let index = self.link(name).await?.ok_or_else(|| Error::Io {
            doing: format!("bring up {name}"),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        let doing = || format!("bring up {name}");
        if let Some(mac) = mac {
            let message = LinkUnspec::new_with_index(index).address(mac.to_vec()).build();
            self.handle.link().set(message).execute().await.map_err(Error::netlink(doing()))?;
        }
        let message = LinkUnspec::new_with_index(index).mtu(mtu).up().build();
        self.handle.link().set(message).execute().await.map_err(Error::netlink(doing()))?;
        let add = self.handle.address().add(index, IpAddr::V4(address), prefix).replace();
        add.execute().await.map_err(Error::netlink(format!("set the address of {name}")))?;
        Ok(index)
    }

    /// Makes the MAC of a neighbour permanent, so that the kernel never asks for it.
    pub(crate) async fn fix_neighbour(&self, link: u32, address: Ipv4Addr, mac: [u8; 6]) -> Result<()> {
        let add = self.handle.neighbours().add(link, IpAddr::V4(address)).link_layer_address(&mac);
        add.state(NeighbourState::Permanent)
            .replace()
            .execute()
            .await
            .map_err(Error::netlink("set the guest's neighbour entry"))
    }

    /// Makes `gateway` the default route.
    pub(crate) async fn default_route(&self, gateway: Ipv4Addr) -> Result<()> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new().gateway(gateway).build();
        let add = self.handle.route().add(route).replace();
        add.execute().await.map_err(Error::netlink("add the slot's default route"))
    }

    /// All IPv4 unicast routes of the main table, and all claims.
    pub(crate) async fn routes(&self) -> Result<Vec<Route>> {
        let filter = RouteMessageBuilder::<Ipv4Addr>::new().build();
        let mut routes = self.handle.route().get(filter).execute();
        let mut found = Vec::new();
        while let Some(route) = routes.try_next().await.map_err(Error::netlink("list routes"))? {
            if route.header.table == RouteHeader::RT_TABLE_MAIN {
                found.extend(read_route(&route));
            }
        }
        Ok(found)
    }

    /// Where traffic to the internet leaves. None if the host has no default route.
    pub(crate) async fn exit(&self) -> Result<Option<Exit>> {
        let routes = self.routes().await?;
        let defaults = routes.into_iter().filter(|route| route.to.prefix_len() == 0);
        let best = defaults.min_by_key(|route| route.metric).and_then(|route| route.link);
        let links = if best.is_some() { self.links().await? } else { Vec::new() };
        let found = links.into_iter().find(|(index, ..)| Some(*index) == best);
        Ok(found.map(|(_, link, mtu)| Exit { link, mtu }))
    }

    /// Claims a range: packets to slots that do not exist stop here, and other nodes see the claim.
    pub(crate) async fn claim(&self, range: Cidr, tag: &NodeTag) -> Result<()> {
        let add = self.handle.route().add(claim(range, tag)).replace();
        add.execute().await.map_err(Error::netlink(format!("claim {range}")))
    }

    /// Removes a claim. It is not an error if it is already gone.
    pub(crate) async fn unclaim(&self, range: Cidr, tag: &NodeTag) -> Result<()> {
        match self.handle.route().del(claim(range, tag)).execute().await {
            Err(error) if !is(&error, rustix::io::Errno::SRCH) => {
                Err(Error::netlink(format!("release {range}"))(error))
            }
            _ => Ok(()),
        }
    }
}

fn claim(range: Cidr, tag: &NodeTag) -> RouteMessage {
    RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(range.addr(), range.prefix_len())
        .kind(RouteType::Unreachable)
        .protocol(CLAIM_PROTOCOL)
        .priority(tag.metric())
        .build()
}

fn read_route(route: &RouteMessage) -> Option<Route> {
    let (mut base, mut metric, mut link) = (Ipv4Addr::UNSPECIFIED, 0, None);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => base = *address,
            RouteAttribute::Priority(value) => metric = *value,
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::MultiPath(hops) => link = hops.first().map(|hop| hop.interface_index),
            _ => {}
        }
    }
    let to = Cidr::of(base, route.header.destination_prefix_length)?;
    let claim = (route.header.protocol == CLAIM_PROTOCOL).then(|| NodeTag::of_metric(metric)).flatten();
    Some(Route { to, metric, link, claim })
}

fn is(error: &rtnetlink::Error, errno: rustix::io::Errno) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(message)
        if message.code.is_some_and(|code| code.get() == -errno.raw_os_error()))
}
