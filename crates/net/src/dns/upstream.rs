//! The resolvers behind the forwarder.

use super::query::Query;
use parking_lot::Mutex;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant, SystemTime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// How often to check whether it has changed.
const RECHECK: Duration = Duration::from_secs(2);
/// Resolvers used, as in the C library.
const MAX_RESOLVERS: usize = 3;
/// How long one resolver may take. Guests retry after five seconds; two resolvers fit into that.
const PATIENCE: Duration = Duration::from_millis(2000);
/// Largest UDP answer that is read. We announce less, so a larger one is not for us.
const MAX_UDP: usize = 4096;

/// Where queries go: fixed addresses, or the name servers in the host's resolv.conf at the time.
#[derive(Debug)]
pub(crate) struct Upstream {
    fixed: Option<Vec<SocketAddr>>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Clone, Default)]
struct Seen {
    checked: Option<Instant>,
    modified: Option<SystemTime>,
    resolvers: Vec<SocketAddr>,
}

impl Upstream {
    pub(crate) fn new(fixed: Option<Vec<SocketAddr>>) -> Self {
        Self { fixed, seen: Mutex::default() }
    }

    /// The resolvers now.
    pub(crate) async fn resolvers(&self) -> Vec<SocketAddr> {
        if let Some(fixed) = &self.fixed {
            return fixed.clone();
        }
        let seen = self.seen.lock().clone();
        if seen.checked.is_some_and(|at| at.elapsed() < RECHECK) {
            return seen.resolvers;
        }
        let modified = tokio::fs::metadata(RESOLV_CONF).await.and_then(|meta| meta.modified()).ok();
        let resolvers = if modified.is_some() && modified == seen.modified {
            seen.resolvers
        } else {
            parse(&tokio::fs::read_to_string(RESOLV_CONF).await.unwrap_or_default())
        };
        *self.seen.lock() = Seen { checked: Some(Instant::now()), modified, resolvers: resolvers.clone() };
        resolvers
    }

    /// Asks one resolver after the other. None if no resolver answers.
    pub(super) async fn ask(&self, query: &Query) -> Option<Vec<u8>> {
        for resolver in self.resolvers().await.into_iter().take(MAX_RESOLVERS) {
            if let Some(answer) = ask_one(resolver, query).await {
                return Some(answer);
            }
        }
        None
    }
}

async fn ask_one(resolver: SocketAddr, query: &Query) -> Option<Vec<u8>> {
    let (short, cut) = timeout(PATIENCE, over_udp(resolver, query)).await.ok()?.ok()?;
    if !cut {
        return Some(short);
    }
    // An answer that is marked as truncated is better than none.
    Some(timeout(PATIENCE, over_tcp(resolver, query)).await.ok().and_then(io::Result::ok).unwrap_or(short))
}

/// Each query has its own socket: the random port is half of what makes an answer hard to forge.
async fn over_udp(resolver: SocketAddr, query: &Query) -> io::Result<(Vec<u8>, bool)> {
    let any: IpAddr =
        if resolver.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    let id = rand::random();
    socket.send(&query.upstream(id).ok_or(io::ErrorKind::InvalidInput)?).await?;
    let mut buffer = vec![0; MAX_UDP];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let bytes = buffer.get(..length).unwrap_or_default().to_vec();
        if let Some(accepted) = query.accept(id, bytes) {
            return Ok(accepted);
        }
    }
}

async fn over_tcp(resolver: SocketAddr, query: &Query) -> io::Result<Vec<u8>> {
    let id = rand::random();
    let bytes = query.upstream(id).ok_or(io::ErrorKind::InvalidInput)?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut stream = TcpStream::connect(resolver).await?;
    stream.write_all(&[&length.to_be_bytes()[..], &bytes].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    let (answer, _) = query.accept(id, answer).ok_or(io::ErrorKind::InvalidData)?;
    Ok(answer)
}

/// The name servers of a resolv.conf. Scoped IPv6 addresses are left out: they mean nothing without
/// a link.
fn parse(text: &str) -> Vec<SocketAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse::<IpAddr>().ok()).flatten()
    });
    let mut found: Vec<_> = servers.map(|address| SocketAddr::new(address, 53)).take(MAX_RESOLVERS).collect();
    if found.is_empty() {
        // As the C library does.
        found.push(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 53));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_is_read_as_the_c_library_does() {
        let text = "# nameserver 9.9.9.9\nsearch lan\n nameserver\t192.0.2.1 # x\nnameserver fe80::1%eth0\n\
                    nameserver 2001:db8::1\nnameserver 192.0.2.2\nnameserver 192.0.2.3\n";
        let found: Vec<_> = parse(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["192.0.2.1:53", "[2001:db8::1]:53", "192.0.2.2:53"]);
        assert_eq!(parse("")[0].to_string(), "127.0.0.1:53");
    }
}
