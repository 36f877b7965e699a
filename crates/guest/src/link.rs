//! One connection after another over the agent port.
//!
//! ```text
//!   listen ──hello──> answered ──first byte of HTTP/2──> session ──end of file, error──> listen
//!     ^                  │  ^                               │
//!     └── anything else ─┘  └──────── another hello ────────┘
//! ```
//!
//! A machine may be frozen anywhere in this and wake up in a copy whose host knows nothing of it. Mostly the
//! port then reads as ended. But a host that connects at once may be there before the guest has looked, and
//! its hello arrives in the middle of a session, where HTTP/2 would take it for the rest of a frame it waits
//! for. So a session looks for hellos too, and ends at one.

use crate::{individual::uptime, log, port::Port, service::Agent};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use keiki_protocol::{
    AGENT_PORT, MAX_CALLS,
    guest::guest_server::GuestServer,
    handshake::{HELLO_LEN, Hello, MARKER, Scanner},
    secrets,
};
use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    task::JoinSet,
    time::sleep,
};

/// How long a port without host is left alone unless it reports a change.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Input in flight per call.
const STREAM_WINDOW: u32 = 128 << 10;
/// Input in flight altogether.
const CONNECTION_WINDOW: u32 = MAX_CALLS * STREAM_WINDOW;
/// The largest message taken from the node: all secrets of a sandbox, and what comes with them.
const MAX_MESSAGE: usize = secrets::MAX * secrets::MAX_BYTES + (1 << 20);

/// Serves the node for ever.
pub async fn serve(agent: Agent) {
    let port = loop {
        match Port::open(AGENT_PORT) {
            Ok(port) => break Arc::new(port),
            Err(error) => {
                log::line(&format!("agent port: {error}"));
                sleep(Duration::from_millis(100)).await;
            }
        }
    };
    let mut pending = vec![];
    loop {
        let hello = match handshake(&port, pending, agent.generation()).await {
            Ok((hello, first)) => {
                pending = session(&port, first, &agent, hello).await;
                continue;
            }
            Err(error) => error,
        };
        log::line(&format!("agent port: {hello}"));
        pending = vec![];
        sleep(Duration::from_millis(10)).await;
    }
}

/// Finds a hello, answers it, and returns it with the first bytes of HTTP/2.
async fn handshake(port: &Port, mut bytes: Vec<u8>, generation: u64) -> io::Result<(Hello, Vec<u8>)> {
    let mut scanner = Scanner::default();
    let mut met: Option<Hello> = None;
    loop {
        // After an answer, what is no hello is the session.
        if let Some(hello) = met {
            match bytes.first() {
                Some(&first) if first != MARKER[0] => return Ok((hello, bytes)),
                Some(_) if bytes.len() >= HELLO_LEN => {
                    let (head, rest) = bytes.split_at(HELLO_LEN);
                    let again = <&[u8; HELLO_LEN]>::try_from(head).ok().and_then(|h| Hello::decode(h).ok());
                    if again == Some(hello) {
                        bytes = rest.to_vec();
                        continue;
                    }
                    met = None;
                }
                _ => {}
            }
        }
        if met.is_none()
            && let Some(at) =
                bytes.iter().position(|&byte| scanner.push(byte).map(|h| met = Some(h)).is_some())
        {
            bytes.drain(..=at);
            if let Some(hello) = met {
                let ours = Hello { uptime_ms: uptime(), ..Hello::new(generation, hello.nonce) };
                answer(port, ours).await?;
            }
            continue;
        }
        if met.is_none() {
            bytes.clear();
        }
        let mut buffer = [0; 4096];
        match poll_fn(|cx| port.poll_read(cx, &mut buffer)).await? {
            0 => {
                (met, bytes) = (None, vec![]);
                port.changed(LOOK_AGAIN).await;
            }
            got => bytes.extend_from_slice(&buffer[..got]),
        }
    }
}

/// Sends a hello, unless the host stops listening.
async fn answer(port: &Port, hello: Hello) -> io::Result<()> {
    let wire = hello.encode();
    let mut left: &[u8] = &wire;
    let send = async {
        while !left.is_empty() {
            left = &left[poll_fn(|cx| port.poll_write(cx, left)).await?..];
        }
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(1), send).await.unwrap_or(Ok(()))
}

/// Speaks HTTP/2 until the connection ends. Returns what was read of the next one.
async fn session(port: &Arc<Port>, first: Vec<u8>, agent: &Agent, hello: Hello) -> Vec<u8> {
    if hello.agree().is_none() {
        log::line(&format!("the node speaks protocol {} to {}", hello.oldest, hello.version));
        return vec![];
    }
    let over = Arc::new(Over::default());
    let stream = Stream { port: port.clone(), first, watch: HelloWatch::default(), over: over.clone() };
    let tasks = Tasks::default();
    let server = GuestServer::new(agent.clone()).max_decoding_message_size(MAX_MESSAGE);
    let connection = hyper::server::conn::http2::Builder::new(tasks.clone())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MAX_CALLS)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(server));
    let mut ended = pin!(over.notify.notified());
    ended.as_mut().enable();
    tokio::select! {
        biased;
        () = ended => {}
        _ = connection => {}
    }
    // Calls end with their connection; sessions they watched go on without them.
    tasks.abort();
    std::mem::take(&mut *over.pending.lock().unwrap_or_else(PoisonError::into_inner))
}

/// How a session's end reaches the loop around it.
#[derive(Debug, Default)]
struct Over {
    notify: Notify,
    pending: Mutex<Vec<u8>>,
}

/// The calls of one connection.
#[derive(Debug, Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    fn abort(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, future: F) {
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while set.try_join_next().is_some() {}
        set.spawn(future);
    }
}

/// The port as HTTP/2 sees it.
struct Stream {
    port: Arc<Port>,
    first: Vec<u8>,
    watch: HelloWatch,
    over: Arc<Over>,
}

impl Stream {
    fn end(&self, pending: Vec<u8>) -> io::Error {
        *self.over.pending.lock().unwrap_or_else(PoisonError::into_inner) = pending;
        self.over.notify.notify_waiters();
        io::ErrorKind::ConnectionReset.into()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let take = self.first.len().min(buffer.remaining());
            buffer.put_slice(&self.first[..take]);
            self.first.drain(..take);
            return Poll::Ready(Ok(()));
        }
        let this = &mut *self;
        let space = buffer.initialize_unfilled();
        let got = match std::task::ready!(this.port.poll_read(context, space)) {
            Ok(0) => return Poll::Ready(Err(this.end(vec![]))),
            Err(error) => {
                this.end(vec![]);
                return Poll::Ready(Err(error));
            }
            Ok(got) => got,
        };
        if let Some(pending) = this.watch.feed(&space[..got]) {
            return Poll::Ready(Err(this.end(pending)));
        }
        buffer.advance(got);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.port.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Finds a hello in a session's input, over the edges of what is read at a time.
#[derive(Debug, Default)]
struct HelloWatch {
    candidate: Vec<u8>,
}

impl HelloWatch {
    /// Takes what was read. If a hello is complete in it: that hello and all that follows.
    fn feed(&mut self, mut bytes: &[u8]) -> Option<Vec<u8>> {
        loop {
            if self.candidate.is_empty() {
                bytes = &bytes[memchr::memchr(MARKER[0], bytes)?..];
            }
            let (&byte, rest) = bytes.split_first()?;
            bytes = rest;
            let at = self.candidate.len();
            if at < MARKER.len() && byte != MARKER[at] {
                // A longer run of the marker's first byte may still end in a marker.
                if !(at == 3 && byte == MARKER[0]) {
                    self.candidate.clear();
                }
                if byte == MARKER[0] && self.candidate.is_empty() {
                    self.candidate.push(byte);
                }
                continue;
            }
            self.candidate.push(byte);
            if let Ok(whole) = <&[u8; HELLO_LEN]>::try_from(self.candidate.as_slice()) {
                if Hello::decode(whole).is_ok() {
                    let mut found = std::mem::take(&mut self.candidate);
                    found.extend_from_slice(bytes);
                    return Some(found);
                }
                self.candidate.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HelloWatch;
    use keiki_protocol::handshake::Hello;
    use proptest::prelude::{any, prop};

    #[test]
    fn a_damaged_hello_is_data() {
        let mut wire = Hello::new(1, [2; 16]).encode();
        wire[63] ^= 1;
        assert_eq!(HelloWatch::default().feed(&wire), None);
    }

    proptest::proptest! {
        #[test]
        fn a_hello_is_found_wherever_reads_end(
            before in prop::collection::vec(prop::sample::select(vec![0xffu8, b'K', 0, 7]), 0..200),
            after in prop::collection::vec(any::<u8>(), 0..50),
            size in 1usize..150,
        ) {
            let hello = Hello::new(3, [0xff; 16]).encode();
            let stream = [&before[..], &hello, &after].concat();
            let mut watch = HelloWatch::default();
            let mut fed = 0;
            let found = stream.chunks(size).find_map(|chunk| {
                fed += chunk.len();
                watch.feed(chunk)
            });
            let expected = &stream[before.len()..fed];
            assert_eq!(found.as_deref(), Some(expected));
        }
    }
}
