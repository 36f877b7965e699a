//! One connection after another over the agent port.
//!
//! ```text
//!   listen ──hello──> answered ──call──> carried out ──reply──> answered        the release gate
//!     ^                  │  ^                │
//!     │                  │  └─ another hello ┤
//!     │                  └──'P' of HTTP/2──> session
//!     └── end of file, error, anything else ─┘
//! ```
//!
//! A machine may be frozen in any of these states and resume in a copy whose host knows nothing
//! about the connection. Usually the port then reads as ended. But if a new host connects before
//! the guest has noticed, its hello arrives in the middle of a call or session, which would take it
//! for more of its input. So both also scan for hellos, and end at one.

use crate::{identity::uptime, log, port::Port, service::Agent};
use bytes::BytesMut;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use keiki_protocol::{
    AGENT_PORT, MAX_CALLS,
    gate::{Call, GateError, HEAD, MAX_CALL, take_call},
    guest::guest_server::GuestServer,
    handshake::{HELLO_LEN, Hello, MARKER, Scanner},
};
use parking_lot::Mutex;
use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
    task::JoinSet,
    time::sleep,
};

/// How long to wait for a change of a port without a host before reading again.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Input in flight per call.
const STREAM_WINDOW: u32 = 128 << 10;
/// Input in flight for all calls together.
const CONNECTION_WINDOW: u32 = MAX_CALLS * STREAM_WINDOW;
/// Bytes read at a time before HTTP/2.
const READ: usize = 4096;
/// The first byte of HTTP/2.
const HTTP2: u8 = b'P';

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
        pending = match connection(&port, pending, &agent).await {
            Ok(pending) => pending,
            Err(error) => {
                log::line(&format!("agent port: {error}"));
                sleep(Duration::from_millis(10)).await;
                vec![]
            }
        };
    }
}

/// Serves one connection until it ends. Returns the bytes that were read of the next one.
async fn connection(port: &Arc<Port>, pending: Vec<u8>, agent: &Agent) -> io::Result<Vec<u8>> {
    let (hello, rest) = listen(port, pending).await?;
    let ours = Hello { uptime_ms: uptime(), ..Hello::new(agent.generation(), hello.nonce) };
    // Also to a node of another version, which can then report why it gives up.
    send(port, &ours.encode()).await?;
    if hello.agree().is_none() {
        log::line(&format!("the node speaks protocol versions {} to {}", hello.oldest, hello.version));
        return Ok(vec![]);
    }
    let mut input = Input { hello, watch: HelloWatch::default(), bytes: BytesMut::new() };
    if let Some(pending) = input.take(&rest) {
        return Ok(pending);
    }
    match gate(port, &mut input, agent).await? {
        Some(pending) => Ok(pending),
        None => Ok(session(port, input, agent).await),
    }
}

/// Finds a hello. Returns it with the bytes read after it.
async fn listen(port: &Port, mut bytes: Vec<u8>) -> io::Result<(Hello, Vec<u8>)> {
    let mut scanner = Scanner::default();
    loop {
        for (at, &byte) in bytes.iter().enumerate() {
            if let Some(hello) = scanner.push(byte) {
                return Ok((hello, bytes.split_off(at + 1)));
            }
        }
        bytes.resize(READ, 0);
        let got = poll_fn(|cx| port.poll_read(cx, &mut bytes)).await?;
        bytes.truncate(got);
        if got == 0 {
            port.changed(LOOK_AGAIN).await;
        }
    }
}

/// Sends bytes, unless the host stops reading.
async fn send(port: &Port, mut left: &[u8]) -> io::Result<()> {
    let send = async {
        while !left.is_empty() {
            left = &left[poll_fn(|cx| port.poll_write(cx, left)).await?..];
        }
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(1), send).await.unwrap_or(Ok(()))
}

/// Carries out calls of the release gate until HTTP/2 begins. If the connection ends before that,
/// returns the bytes read of the next one.
async fn gate(port: &Port, input: &mut Input, agent: &Agent) -> io::Result<Option<Vec<u8>>> {
    loop {
        match input.next() {
            Ok(Some(Next::Http2)) => return Ok(None),
            Ok(Some(Next::Call(call))) => {
                // The work first: usually it is done before anything can be read.
                let reply = tokio::select! {
                    biased;
                    reply = agent.gate(call) => reply,
                    pending = input.end(port) => return pending.map(Some),
                };
                send(port, &reply).await?;
            }
            Ok(None) => {
                if let Some(pending) = input.more(port).await? {
                    return Ok(Some(pending));
                }
            }
            Err(error) => {
                log::line(&format!("agent port: {error}"));
                // A hello may have begun in these bytes.
                return Ok(Some(std::mem::take(&mut input.watch.candidate)));
            }
        }
    }
}

/// Input of a host until HTTP/2 begins.
#[derive(Debug)]
struct Input {
    /// The hello that began it.
    hello: Hello,
    watch: HelloWatch,
    bytes: BytesMut,
}

/// What the input continues with.
#[derive(Debug)]
enum Next {
    Call(Call),
    Http2,
}

impl Input {
    /// What the input continues with. None if it is incomplete.
    fn next(&mut self) -> Result<Option<Next>, GateError> {
        match self.bytes.first() {
            Some(&HTTP2) => Ok(Some(Next::Http2)),
            // A repeated hello.
            Some(&first) if first == MARKER[0] && self.bytes.len() < HELLO_LEN => Ok(None),
            _ => Ok(take_call(&mut self.bytes)?.map(Next::Call)),
        }
    }

    /// Reads more. If the connection ends here, returns the bytes read of the next one.
    async fn more(&mut self, port: &Port) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = [0; READ];
        match poll_fn(|cx| port.poll_read(cx, &mut buffer)).await? {
            0 => Ok(Some(vec![])),
            got => Ok(self.take(&buffer[..got])),
        }
    }

    /// Waits for the end of the connection. Other input is kept for later.
    async fn end(&mut self, port: &Port) -> io::Result<Vec<u8>> {
        while self.bytes.len() <= HEAD + MAX_CALL {
            if let Some(pending) = self.more(port).await? {
                return Ok(pending);
            }
        }
        Ok(vec![])
    }

    /// Adds bytes. If another connection begins in them, returns its bytes. The connection's own
    /// hello may be repeated.
    fn take(&mut self, read: &[u8]) -> Option<Vec<u8>> {
        let mut found = self.watch.feed(read);
        if found.is_none() {
            self.bytes.extend_from_slice(read);
        }
        while let Some(pending) = found {
            self.bytes.clear();
            let (head, rest) = pending.split_first_chunk::<HELLO_LEN>()?;
            if Hello::decode(head) != Ok(self.hello) {
                return Some(pending);
            }
            found = self.watch.feed(rest);
            if found.is_none() {
                self.bytes.extend_from_slice(rest);
            }
        }
        None
    }
}

/// Speaks HTTP/2 until the connection ends. Returns the bytes read of the next one.
async fn session(port: &Arc<Port>, input: Input, agent: &Agent) -> Vec<u8> {
    let over = Arc::new(Over::default());
    let stream = Stream { port: port.clone(), first: input.bytes, watch: input.watch, over: over.clone() };
    let tasks = Tasks::default();
    let server = GuestServer::new(agent.clone()).max_decoding_message_size(MAX_CALL);
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
    // Calls end with their connection; commands continue without them.
    tasks.abort();
    std::mem::take(&mut *over.pending.lock())
}

/// Reports the end of an HTTP/2 session.
#[derive(Debug, Default)]
struct Over {
    notify: Notify,
    pending: Mutex<Vec<u8>>,
}

/// The running calls of one connection.
#[derive(Debug, Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Tasks {
    fn abort(&self) {
        self.0.lock().abort_all();
    }
}

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, future: F) {
        let mut set = self.0.lock();
        while set.try_join_next().is_some() {}
        set.spawn(future);
    }
}

/// The port as HTTP/2 sees it.
struct Stream {
    port: Arc<Port>,
    first: BytesMut,
    watch: HelloWatch,
    over: Arc<Over>,
}

impl Stream {
    fn end(&self, pending: Vec<u8>) -> io::Error {
        *self.over.pending.lock() = pending;
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
            buffer.put_slice(&self.first.split_to(take));
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

/// Finds a hello in a connection's input, across the boundaries of reads.
#[derive(Debug, Default)]
struct HelloWatch {
    candidate: Vec<u8>,
}

impl HelloWatch {
    /// Adds bytes. If they complete a hello, returns that hello and everything after it.
    fn feed(&mut self, mut bytes: &[u8]) -> Option<Vec<u8>> {
        loop {
            if self.candidate.is_empty() {
                bytes = &bytes[memchr::memchr(MARKER[0], bytes)?..];
            }
            let (&byte, rest) = bytes.split_first()?;
            bytes = rest;
            let at = self.candidate.len();
            if at < MARKER.len() && byte != MARKER[at] {
                // A longer run of the marker's first byte may still contain a marker.
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
    use super::{HelloWatch, Input, Next};
    use bytes::BytesMut;
    use keiki_protocol::{
        gate::{Call, GateError, call},
        guest::{Identity, ThawUserRequest},
        handshake::{HELLO_LEN, Hello, Scanner},
    };
    use proptest::prelude::{any, prop};

    fn input(hello: Hello) -> Input {
        Input { hello, watch: HelloWatch::default(), bytes: BytesMut::new() }
    }

    #[test]
    fn what_is_no_call_ends_a_connection() {
        let next = |bytes: &[u8]| {
            let mut input = input(Hello::new(1, [2; 16]));
            assert_eq!(input.take(bytes), None);
            input.next()
        };
        assert!(matches!(next(b"PRI * HTTP/2.0"), Ok(Some(Next::Http2))));
        assert!(matches!(next(&[9, 9]), Err(GateError::Kind(9))));
        assert!(matches!(next(&[0xff; HELLO_LEN - 1]), Ok(None)));
        assert!(matches!(next(&[0xff; HELLO_LEN]), Err(GateError::Kind(0xff))));
        assert!(matches!(next(&[2, 0xff, 0xff, 0xff, 0xff]), Err(GateError::Length(..))));
    }

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

        /// A host that repeats its hello, makes two calls and goes over to HTTP/2, wherever reads
        /// end.
        #[test]
        fn calls_are_found_behind_repeated_hellos(
            repeats in 0usize..4,
            entropy in prop::collection::vec(any::<u8>(), 0..300),
            size in 1usize..400,
        ) {
            let hello = Hello::new(1, [2; 16]);
            let order = Identity { entropy: entropy.into(), ..Identity::default() };
            let stream =
                [&hello.encode().repeat(repeats)[..], &call(&order), &call(&ThawUserRequest {}), b"PRI *"].concat();
            let (mut input, mut found) = (input(hello), vec![]);
            for chunk in stream.chunks(size) {
                assert_eq!(input.take(chunk), None);
                while let Some(Next::Call(call)) = input.next().unwrap() {
                    found.push(call);
                }
            }
            assert_eq!(found, [Call::AssumeIdentity(order.into()), Call::ThawUser(ThawUserRequest {})]);
            assert!(matches!(input.next(), Ok(Some(Next::Http2))));
            assert!(b"PRI *".ends_with(&input.bytes) && !input.bytes.is_empty());
        }

        /// A copy of a machine that was frozen anywhere in a call: its own host's hello is found.
        #[test]
        fn another_hello_ends_a_call_at_any_byte(
            entropy in prop::collection::vec(prop::sample::select(vec![0xffu8, b'K', 0, 7]), 0..300),
            cut in any::<prop::sample::Index>(),
            after in prop::collection::vec(any::<u8>(), 0..50),
            size in 1usize..400,
        ) {
            let order = Identity { entropy: entropy.into(), ..Identity::default() };
            let wire = call(&order);
            let before = &wire[..cut.index(wire.len())];
            let other = Hello::new(3, [4; 16]).encode();
            let stream = [before, &other, &after].concat();
            let mut input = input(Hello::new(1, [2; 16]));
            let mut fed = 0;
            // What the next connection begins with.
            let pending = stream.chunks(size).find_map(|chunk| {
                fed += chunk.len();
                input.take(chunk).or_else(|| match input.next() {
                    // A part of the hello may have been the rest of the call.
                    Ok(_) => None,
                    Err(_) => Some(std::mem::take(&mut input.watch.candidate)),
                })
            });
            let mut scanner = Scanner::default();
            let rest = [&pending.unwrap()[..], &stream[fed..]].concat();
            let at = rest.iter().position(|&byte| scanner.push(byte).is_some()).unwrap();
            assert!(rest[..=at].ends_with(&other) && rest[at + 1..] == after);
        }
    }
}
