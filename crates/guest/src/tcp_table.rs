//! The kernel's tables of TCP sockets, `/proc/net/tcp` and `tcp6`.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

/// States, as the tables number them.
pub const TIME_WAIT: u8 = 6;
pub const CLOSED: u8 = 7;
pub const LISTEN: u8 = 10;

/// A socket. Inode 0 if no process holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Socket {
    pub local: (IpAddr, u16),
    pub peer: (IpAddr, u16),
    pub state: u8,
    pub inode: u64,
}

/// All sockets of a table. Skips malformed lines.
pub fn parse(table: &str) -> impl Iterator<Item = Socket> {
    table.lines().filter_map(socket)
}

/// The inode of a socket, from the target of its link in `/proc/PID/fd`.
pub fn socket_inode(target: &Path) -> Option<u64> {
    target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// `sl local_address rem_address st tx:rx tr:tm retrnsmt uid timeout inode …`
fn socket(line: &str) -> Option<Socket> {
    let mut words = line.split_ascii_whitespace();
    let (local, peer, state) = (words.nth(1)?, words.next()?, words.next()?);
    let state = u8::from_str_radix(state, 16).ok()?;
    let inode = words.nth(5)?.parse().ok()?;
    Some(Socket { local: endpoint(local)?, peer: endpoint(peer)?, state, inode })
}

fn endpoint(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    Some((parse_address(address)?, u16::from_str_radix(port, 16).ok()?))
}

/// Words of 32 bits, each in the byte order of this machine.
fn parse_address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(text.get(at..at + 8)?, 16).ok();
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?.to_ne_bytes()).into()),
        32 => {
            let mut bytes = [0; 16];
            for (at, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(at * 8)?.to_ne_bytes());
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::socket_inode;
    use std::path::Path;

    #[test]
    fn only_sockets_have_an_inode() {
        assert_eq!(socket_inode(Path::new("socket:[77]")), Some(77));
        for other in ["pipe:[77]", "socket:[x]", "socket:77", "/socket:[77]"] {
            assert_eq!(socket_inode(Path::new(other)), None, "{other}");
        }
    }
}
