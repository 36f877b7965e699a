//! The range that slots come from, and the names that a node gives to what it makes.

use crate::{cidr::Cidr, error::Error};
use std::{fmt, net::Ipv4Addr, str::FromStr};

/// The range that slots come from: a /30 each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range(Cidr);

impl Range {
    pub(crate) fn new(cidr: Cidr) -> Result<Self, Error> {
        if (8..=28).contains(&cidr.prefix_len()) { Ok(Self(cidr)) } else { Err(Error::Range(cidr)) }
    }

    pub(crate) fn cidr(self) -> Cidr {
        self.0
    }

    /// How many slots fit; an index is 16 bits wide.
    pub(crate) fn slots(self) -> u32 {
        (1 << (30 - self.0.prefix_len().min(30))).min(u32::from(u16::MAX) + 1)
    }

    /// The host's end of the slot's link.
    pub(crate) fn host_end(self, index: u16) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.0.addr().to_bits() + 4 * u32::from(index) + 1)
    }

    /// The slot's end: the address of the sandbox outside its namespace.
    pub(crate) fn slot_end(self, index: u16) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.0.addr().to_bits() + 4 * u32::from(index) + 2)
    }
}

/// Tells the slots of one node on a host from those of another: 4 to 6 hexadecimal characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NodeTag(String);

/// Prefix of the links of all nodes on the host.
pub(crate) const LINK_PREFIX: &str = "kk-";

impl NodeTag {
    /// Prefix of this node's links on the host.
    pub(crate) fn link_prefix(&self) -> String {
        format!("{LINK_PREFIX}{}-", self.0)
    }

    /// Name of the host's end of a slot's link: at most 15 bytes, as an interface name must be.
    pub(crate) fn link(&self, index: u16) -> String {
        format!("{}{index}", self.link_prefix())
    }

    /// Prefix of this node's namespaces.
    pub(crate) fn netns_prefix(&self) -> String {
        format!("keiki-{}-", self.0)
    }

    /// Name of a slot's namespace.
    pub(crate) fn netns(&self, index: u16) -> String {
        format!("{}{index}", self.netns_prefix())
    }

    /// Name of the host's nftables table.
    pub(crate) fn table(&self) -> String {
        format!("keiki_{}", self.0)
    }

    /// The tag as a number: the metric that marks this node's claim on its range.
    pub(crate) fn number(&self) -> u32 {
        u32::from_str_radix(&self.0, 16).unwrap_or_default()
    }

    /// The length matters: `00ab` and `0000ab` are two nodes.
    pub(crate) fn metric(&self) -> u32 {
        (self.0.len() as u32) << 24 | self.number()
    }

    /// The tag that a metric belongs to.
    pub(crate) fn of_metric(metric: u32) -> Option<Self> {
        let width = (metric >> 24) as usize;
        format!("{:0width$x}", metric & 0x00ff_ffff).parse().ok()
    }
}

impl fmt::Display for NodeTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for NodeTag {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if (4..=6).contains(&text.len()) && text.bytes().all(hex) {
            Ok(Self(text.to_owned()))
        } else {
            Err(Error::Tag(text.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn slots_tile_the_range() {
        let range = Range::new(cidr("10.200.0.0/16")).unwrap();
        assert_eq!(range.slots(), 16_384);
        assert_eq!(range.host_end(0), Ipv4Addr::new(10, 200, 0, 1));
        assert_eq!(range.slot_end(16_383), Ipv4Addr::new(10, 200, 255, 254));
        assert_eq!(Range::new(cidr("10.0.0.0/8")).unwrap().slots(), 65_536);
        assert!(Range::new(cidr("10.200.0.0/30")).is_err());
    }

    #[test]
    fn names_fit_and_tags_survive_the_metric() {
        let tag: NodeTag = "abcdef".parse().unwrap();
        assert!(tag.link(16_383).len() <= 15);
        for text in ["00ab", "0000ab", "abcdef", "12345"] {
            let tag: NodeTag = text.parse().unwrap();
            assert_eq!(NodeTag::of_metric(tag.metric()), Some(tag));
        }
        for wrong in ["abc", "abcdefa", "ABCD", "ab d", "xyzw"] {
            assert!(wrong.parse::<NodeTag>().is_err(), "{wrong}");
        }
    }
}
