//! The name server at a guest's gateway: a forwarder to the host's resolvers.
//!
//! Its sockets are opened inside the slot's namespace and served by the node; queries leave from
//! the host's namespace. So a guest can use a resolver whose address it must not reach, and needs
//! no access to the host.
//!
//! Guests are not trusted. Limits per slot: [`MAX_IN_FLIGHT`] queries at once, [`RATE`] per second
//! with bursts of [`BURST`], [`MAX_STREAMS`] TCP connections, [`MAX_QUERY`] bytes per query. The
//! forwarder parses a query and writes a new one (one question, no options) with a random id and
//! from a random port, and only passes back an answer to that question. It forwards standard
//! queries only: no `ANY` and no zone transfers. Tunnels through DNS are not prevented, only slowed
//! to what the rate allows: about 20 KiB per second.
//!
//! Answers are not filtered: a name that points into a blocked network resolves, and the slot's
//! rules drop the packets. Nothing is cached here; the resolvers do that.

mod query;
mod upstream;

pub(crate) use upstream::Upstream;

use crate::{
    error::{Error, Result},
    slot::Sockets,
};
use keiki_sys::bucket::TokenBucket;
use parking_lot::Mutex;
use query::{Query, Reading};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    task::{JoinHandle, JoinSet},
    time::timeout,
};

/// Queries of one slot being answered at once.
const MAX_IN_FLIGHT: usize = 64;
/// Queries per second of one slot: one every 10 ms.
const RATE: u64 = 100;
const QUERY_INTERVAL: Duration = Duration::from_millis(1000 / RATE);
/// Queries that may come at once after silence.
const BURST: u64 = 300;
/// TCP connections of one slot.
const MAX_STREAMS: usize = 8;
/// Bytes of a query.
const MAX_QUERY: usize = 1024;
/// How long a TCP connection may be silent.
const STREAM_IDLE: Duration = Duration::from_secs(10);

/// The running name server of one slot. Dropping it closes its sockets soon; [`Server::stop`] waits
/// for that.
#[derive(Debug)]
pub(crate) struct Server {
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub(crate) fn start(index: u16, sockets: Sockets, upstream: Arc<Upstream>) -> Result<Self> {
        let serve = |doing: std::io::Error| Error::io("serve DNS in the slot")(doing);
        sockets.udp.set_nonblocking(true).map_err(serve)?;
        sockets.tcp.set_nonblocking(true).map_err(serve)?;
        let shared = Arc::new(Shared {
            index,
            udp: UdpSocket::from_std(sockets.udp).map_err(serve)?,
            upstream,
            in_flight: Semaphore::new(MAX_IN_FLIGHT),
            bucket: Mutex::new(bucket()),
        });
        let tcp = TcpListener::from_std(sockets.tcp).map_err(serve)?;
        Ok(Self { task: tokio::spawn(serve_all(shared, tcp)) })
    }

    /// Stops it. Its sockets, which would keep the namespace alive, are closed on return.
    pub(crate) async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

struct Shared {
    index: u16,
    udp: UdpSocket,
    upstream: Arc<Upstream>,
    in_flight: Semaphore,
    bucket: Mutex<TokenBucket>,
}

async fn serve_all(shared: Arc<Shared>, tcp: TcpListener) {
    // Aborted when this task ends.
    let mut work = JoinSet::new();
    let streams = Arc::new(Semaphore::new(MAX_STREAMS));
    let mut buffer = [0u8; MAX_QUERY + 1];
    loop {
        tokio::select! {
            received = shared.udp.recv_from(&mut buffer) => match received {
                Ok((length, from)) if length <= MAX_QUERY && shared.admits() => {
                    // Beyond this, queries are dropped, as a busy server does.
                    if work.len() < MAX_IN_FLIGHT + MAX_STREAMS {
                        let (shared, bytes) = (Arc::clone(&shared), buffer.get(..length).unwrap_or_default().to_vec());
                        work.spawn(async move {
                            if let Some(answer) = shared.answer(&bytes, Transport::Udp).await {
                                let _ = shared.udp.send_to(&answer, from).await;
                            }
                        });
                    }
                }
                Ok(_) => {}
                Err(error) => pause(&shared, &error).await,
            },
            accepted = tcp.accept() => match accepted {
                Ok((stream, _)) => if let Ok(permit) = Arc::clone(&streams).try_acquire_owned() {
                    let shared = Arc::clone(&shared);
                    work.spawn(async move {
                        let _permit = permit;
                        serve_stream(&shared, stream).await;
                    });
                },
                Err(error) => pause(&shared, &error).await,
            },
            Some(_) = work.join_next() => {}
        }
    }
}

/// Waits after a socket error, which a guest can cause: no busy loop and no flood of log lines.
async fn pause(shared: &Shared, error: &std::io::Error) {
    tracing::debug!(slot = shared.index, %error, "socket error in the name server");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

async fn serve_stream(shared: &Shared, mut stream: TcpStream) {
    let mut query = [0u8; MAX_QUERY];
    loop {
        let one = async {
            let length = usize::from(stream.read_u16().await.ok()?);
            let query = query.get_mut(..length)?;
            stream.read_exact(query).await.ok()?;
            while !shared.admits() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let answer = shared.answer(query, Transport::Tcp).await?;
            let length = u16::try_from(answer.len()).ok()?;
            stream.write_all(&[&length.to_be_bytes()[..], &answer].concat()).await.ok()
        };
        if !matches!(timeout(STREAM_IDLE, one).await, Ok(Some(()))) {
            return;
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    Udp,
    Tcp,
}

impl Shared {
    fn admits(&self) -> bool {
        self.bucket.lock().take(Instant::now())
    }

    /// The answer to a message of the guest, if it gets one.
    async fn answer(&self, bytes: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let query = match Query::read(bytes) {
            Reading::Query(query) => query,
            Reading::Refuse(answer) => return Some(answer),
            Reading::Ignore => return None,
        };
        let Ok(_permit) = self.in_flight.try_acquire() else { return query.failure() };
        let limit = match transport {
            Transport::Udp => query.udp_limit(),
            Transport::Tcp => usize::from(u16::MAX),
        };
        match self.upstream.ask(&query).await {
            Some(answer) if answer.len() <= limit => Some(answer),
            Some(_) => query.truncated(),
            None => query.failure(),
        }
    }
}

fn bucket() -> TokenBucket {
    TokenBucket::new(BURST, 1, QUERY_INTERVAL)
}

#[cfg(test)]
mod tests;
