//! Two requests to the kernel's packet filter that do not need `nft`: forget the flows of a slot,
//! so that the next user of its address starts without them; and check every few seconds whether
//! the node's table still exists.

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

// From `linux/netfilter/nfnetlink.h` and `nfnetlink_conntrack.h`.
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

const GET_TABLE: u16 = 10 << 8 | 1;
const TABLE_NAME: u16 = 1;
const FAMILY_INET: u8 = 1;
const FAMILY_IPV4: u8 = 2;

/// Removes all IPv4 flows that `source` opened from the connection table of the calling thread's
/// namespace.
pub(crate) fn forget(source: Ipv4Addr) -> io::Result<()> {
    match ask(&forget_request(source)) {
        // No flow matched.
        Err(Errno::NOENT) => Ok(()),
        // Kernels before 6.8 cannot delete by address. The flows that stay are harmless: the next
        // user's namespace does not know them and drops their packets.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
        done => Ok(done?),
    }
}

/// Whether the calling thread's namespace has an `inet` table called `name`.
pub(crate) fn has_table(name: &str) -> io::Result<bool> {
    let name = attribute(TABLE_NAME, &[name.as_bytes(), &[0]].concat());
    match ask(&message(GET_TABLE, FAMILY_INET, &name)) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Sends a request and reads its first answer.
fn ask(request: &[u8]) -> Result<(), Errno> {
    let socket = open()?;
    sendto(&socket, request, SendFlags::empty(), &netlink::SocketAddrNetlink::new(0, 0))?;
    let mut reply = [0u8; 1024];
    let (got, _) = recv(&socket, &mut reply[..], RecvFlags::empty())?;
    answer(reply.get(..got).unwrap_or_default())
}

fn open() -> Result<OwnedFd, Errno> {
    let socket =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::NETFILTER))?;
    bind(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(5)))?;
    Ok(socket)
}

fn forget_request(source: Ipv4Addr) -> Vec<u8> {
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
    message(CT_DELETE, FAMILY_IPV4, &[tuple, filter].concat())
}

fn message(kind: u16, family: u8, attributes: &[u8]) -> Vec<u8> {
    // struct nfgenmsg: family, version, resource id.
    let body = [&[family, 0, 0, 0], attributes].concat();
    let length = (16 + body.len()) as u32;
    let mut message = Vec::with_capacity(length as usize);
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(REQUEST_ACK.to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    message
}

/// One netlink attribute, padded to four bytes. All attributes here are far shorter than 64 KiB.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(8 + value.len());
    bytes.extend(((4 + value.len()) as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Any answer that is not an error means success.
fn answer(reply: &[u8]) -> Result<(), Errno> {
    let field = |at: usize, len: usize| reply.get(at..at + len);
    let kind = field(4, 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = field(16, 4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (None, _) | (_, None) => Err(Errno::BADMSG),
        (Some(NLMSG_ERROR), Some(code)) if code != 0 => Err(Errno::from_raw_os_error(code.wrapping_neg())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_but_count_their_own_length() {
        assert_eq!(attribute(3, &[1]).len(), 8);
        assert_eq!(attribute(3, &[1])[..2], 5u16.to_ne_bytes());
        assert_eq!(forget_request(Ipv4Addr::LOCALHOST).len() % 4, 0);
    }

    #[test]
    fn short_answers_are_errors() {
        assert!(answer(&[]).is_err());
        assert!(answer(&[0; 18]).is_err());
    }
}
