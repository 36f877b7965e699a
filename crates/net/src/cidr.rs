//! IPv4 networks.

use ipnet::Ipv4Net;
use std::{fmt, net::Ipv4Addr, ops::Deref, str::FromStr};

/// An IPv4 network without host bits, such as `10.200.0.0/16`. A bare address is a /32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr(Ipv4Net);

/// Text that is not an IPv4 network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not an IPv4 network such as 10.200.0.0/16: `{0}` (host bits must be zero)")]
pub struct CidrError(String);

impl Cidr {
    /// The network that `address` is in.
    pub(crate) fn of(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        Ipv4Net::new(address, prefix).ok().map(|network| Self(network.trunc()))
    }

    /// Do the two share an address?
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.contains(&*other) || other.contains(&*self)
    }
}

impl Deref for Cidr {
    type Target = Ipv4Net;

    fn deref(&self) -> &Ipv4Net {
        &self.0
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let network = text.parse().or_else(|_| text.parse::<Ipv4Addr>().map(Ipv4Net::from));
        let network = network.ok().filter(|network| network.addr() == network.network());
        network.map(Self).ok_or_else(|| CidrError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn networks_are_read_and_written() {
        assert_eq!(cidr("10.200.0.0/16").to_string(), "10.200.0.0/16");
        assert_eq!(cidr("192.0.2.7").to_string(), "192.0.2.7/32");
        assert_eq!(cidr("0.0.0.0/0").to_string(), "0.0.0.0/0");
        for wrong in ["", "10.200.0.1/16", "10.0.0.0/33", "10.0.0.0/", "::/0", "10.0.0.0/8 ; flush ruleset"] {
            assert!(wrong.parse::<Cidr>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn overlap_is_symmetric() {
        for (a, b, expected) in [
            ("10.0.0.0/8", "10.200.0.0/16", true),
            ("10.200.0.0/16", "10.201.0.0/16", false),
            ("0.0.0.0/0", "10.200.0.0/16", true),
            ("10.200.255.255/32", "10.200.0.0/16", true),
        ] {
            assert_eq!(cidr(a).overlaps(cidr(b)), expected);
            assert_eq!(cidr(b).overlaps(cidr(a)), expected);
        }
    }
}
