//! Making the host forget the flows of a slot, so that its next user starts without them.

use rustix::{
    fd::OwnedFd,
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netlink, recv, sendto,
        socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};
use std::{io, net::Ipv4Addr, time::Duration};

// Of `linux/netfilter/nfnetlink.h` and `nfnetlink_conntrack.h`.
const CT_DELETE: u16 = 1 << 8 | 2;
const TUPLE_ORIG: u16 = 1;
const TUPLE_IP: u16 = 1;
const IP_V4_SRC: u16 = 1;
const FILTER: u16 = 25;
const FILTER_ORIG_FLAGS: u16 = 1;
const FILTER_REPLY_FLAGS: u16 = 2;
/// Compare the source address of the tuple.
const FILTER_IP_SRC: u32 = 1;
const NESTED: u16 = 1 << 15;
const REQUEST_ACK: u16 = 1 | 4;
const NLMSG_ERROR: u16 = 2;

/// Removes all IPv4 flows that `source` opened from the connection table of the calling thread's namespace.
pub(crate) fn forget(source: Ipv4Addr) -> io::Result<()> {
    let socket = open()?;
    let kernel = netlink::SocketAddrNetlink::new(0, 0);
    sendto(&socket, &request(source), SendFlags::empty(), &kernel)?;
    let mut reply = [0u8; 1024];
    let (got, _) = recv(&socket, &mut reply[..], RecvFlags::empty())?;
    answer(reply.get(..got).unwrap_or_default())
}

fn open() -> io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::NETFILTER))?;
    bind(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(5)))?;
    Ok(socket)
}

fn request(source: Ipv4Addr) -> Vec<u8> {
    let address = attribute(IP_V4_SRC, &source.octets());
    let tuple = attribute(TUPLE_ORIG | NESTED, &attribute(TUPLE_IP | NESTED, &address));
    let filter = attribute(
        FILTER | NESTED,
        &[
            attribute(FILTER_ORIG_FLAGS, &FILTER_IP_SRC.to_ne_bytes()),
            attribute(FILTER_REPLY_FLAGS, &0u32.to_ne_bytes()),
        ]
        .concat(),
    );
    // struct nfgenmsg: family, version, resource id.
    let body = [&[rustix::net::AddressFamily::INET.as_raw() as u8, 0, 0, 0][..], &tuple, &filter].concat();
    let length = (16 + body.len()) as u32;
    let mut message = Vec::with_capacity(length as usize);
    message.extend(length.to_ne_bytes());
    message.extend(CT_DELETE.to_ne_bytes());
    message.extend(REQUEST_ACK.to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    message
}

/// One netlink attribute, padded to four bytes. All of ours are far below 64 KiB.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(8 + value.len());
    bytes.extend(((4 + value.len()) as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn answer(reply: &[u8]) -> io::Result<()> {
    let field = |at: usize, len: usize| reply.get(at..at + len);
    let kind = field(4, 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = field(16, 4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(code)) => {
            let error = io::Error::from_raw_os_error(-code);
            match Errno::from_io_error(&error) {
                // No flow matched.
                Some(Errno::NOENT) => Ok(()),
                // Kernels before 6.8 cannot select by address when they delete. What stays is harmless: the
                // next user's namespace knows none of these flows and drops what belongs to them.
                Some(Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
                _ => Err(error),
            }
        }
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_but_count_their_own_length() {
        assert_eq!(attribute(3, &[1]).len(), 8);
        assert_eq!(attribute(3, &[1])[..2], 5u16.to_ne_bytes());
        assert_eq!(request(Ipv4Addr::LOCALHOST).len() % 4, 0);
    }

    #[test]
    fn short_answers_are_errors() {
        assert!(answer(&[]).is_err());
        assert!(answer(&[0; 18]).is_err());
    }
}
