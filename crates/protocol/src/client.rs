//! The node's end of a connection: the handshake over the agent port's socket, the calls of the
//! release gate, then a gRPC client.
//!
//! The socket may still deliver bytes of an old connection that was frozen with its machine, and
//! the guest may not be listening yet. So the node repeats its hello until it reads the echo,
//! discards everything before that, and uses what follows.
//!
//! A channel lasts as long as its socket and never reconnects: when it fails, connect a new socket.

use crate::{
    MAX_CALLS,
    gate::{self, Ask},
    guest::guest_client::GuestClient,
    handshake::{HELLO_LEN, Hello, MARKER, Scanner, VERSION},
};
use hyper_util::rt::TokioIo;
use prost::bytes::BytesMut;
use std::{
    io,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::{MissedTickBehavior, interval, timeout},
};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

/// How often an unanswered hello is repeated.
const REPEAT: Duration = Duration::from_millis(25);
/// Output in flight per call. A guest keeps more than this of the output it has sent, so nothing is
/// lost with the connection.
const STREAM_WINDOW: u32 = 256 << 10;
/// Output in flight for all calls together: with less, a call that is not read would block the
/// others.
const CONNECTION_WINDOW: u32 = MAX_CALLS * STREAM_WINDOW;
/// Most bytes before the echo of a hello: what a frozen machine had in flight, with room to spare.
const MAX_RUBBISH: usize = 64 << 20;
/// Bytes read at a time.
const READ: usize = 4 << 10;
/// Most bytes of headers in one answer.
const MAX_HEADERS: u32 = 16 << 10;
/// The largest single message accepted from a guest.
pub const MAX_MESSAGE: usize = 16 << 20;

/// Why no connection was made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No answer in time.
    #[error("the guest agent did not answer within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The socket ended or failed.
    #[error("the agent port failed")]
    Io(#[from] io::Error),
    /// No common version.
    #[error("the guest agent speaks protocol {oldest} to {newest}, this build speaks {VERSION}")]
    Version {
        /// Oldest version it understands.
        oldest: u16,
        /// Newest version it speaks.
        newest: u16,
    },
    /// HTTP/2 did not start.
    #[error("the agent connection failed")]
    Transport(#[from] tonic::transport::Error),
}

/// An answered hello.
#[derive(Debug, Clone, Copy)]
pub struct Met {
    /// The agent's hello.
    pub hello: Hello,
    /// When our first hello was sent. The agent wrote its hello between this and `answered`.
    pub asked: Instant,
    /// When the agent's hello was read.
    pub answered: Instant,
}

/// A connection to an agent that has answered a hello: calls of the release gate, and then HTTP/2.
#[derive(Debug)]
pub struct Opened {
    read: OwnedReadHalf,
    write: OwnedWriteHalf,
    /// Bytes that were read but not used yet.
    ahead: BytesMut,
    hello: Hello,
}

impl Opened {
    /// Connects to the agent behind `stream`, within `limit`. `generation` is the one that the
    /// guest will get or has; the returned hello says which one it has.
    ///
    /// # Errors
    /// If the guest does not answer in time, speaks no common version, or the socket fails.
    pub async fn open(
        stream: UnixStream,
        generation: u64,
        limit: Duration,
    ) -> Result<(Self, Met), ConnectError> {
        let (read, write) = stream.into_split();
        let hello = Hello::new(generation, [0; 16]);
        let mut opened = Self { read, write, ahead: BytesMut::new(), hello };
        let met = timeout(limit, opened.meet()).await.map_err(|_| ConnectError::Timeout(limit))??;
        Ok((opened, met))
    }

    /// Sends a hello. If it is sent again, the agent starts over.
    ///
    /// # Errors
    /// If it speaks no common version, or the socket fails.
    pub async fn meet(&mut self) -> Result<Met, ConnectError> {
        self.hello.nonce = rand::random();
        let asked = Instant::now();
        let (hello, rest) = shake(&mut self.read, &mut self.write, self.hello).await?;
        let met = Met { hello, asked, answered: Instant::now() };
        if hello.agree().is_none() {
            return Err(ConnectError::Version { oldest: hello.oldest, newest: hello.version });
        }
        self.ahead = BytesMut::from(&rest[..]);
        Ok(met)
    }

    /// Makes a call of the release gate. The guest may send anything: this limits its size, the
    /// caller its time.
    ///
    /// # Errors
    /// The agent's error, or that it did not answer.
    pub async fn call<A: Ask>(&mut self, ask: &A) -> Result<A::Reply, Status> {
        let broken = |error: io::Error| Status::unavailable(format!("the agent port failed: {error}"));
        self.skip_echoes();
        if !self.ahead.is_empty() {
            return Err(Status::internal("the agent answered before it was asked"));
        }
        self.write.write_all(&gate::call(ask)).await.map_err(broken)?;
        loop {
            self.skip_echoes();
            let may_be_echo = self.ahead.len() < HELLO_LEN
                && MARKER.iter().zip(&self.ahead).all(|(one, other)| one == other);
            if !may_be_echo {
                let taken = gate::take_reply(&mut self.ahead);
                if let Some(reply) =
                    taken.map_err(|error| Status::internal(format!("the agent sent {error}")))?
                {
                    return reply;
                }
            }
            self.ahead.reserve(READ);
            if self.read.read_buf(&mut self.ahead).await.map_err(broken)? == 0 {
                return Err(Status::unavailable("the agent port has closed"));
            }
        }
    }

    /// An agent whose port was closed and opened again may answer a repeated hello a second time.
    fn skip_echoes(&mut self) {
        while let Some(head) = self.ahead.first_chunk::<HELLO_LEN>()
            && Hello::decode(head).is_ok_and(|hello| hello.nonce == self.hello.nonce)
        {
            drop(self.ahead.split_to(HELLO_LEN));
        }
    }

    /// Switches to HTTP/2. Does not wait for the guest.
    ///
    /// # Errors
    /// If the socket has failed.
    pub async fn client(mut self) -> Result<GuestClient<Channel>, ConnectError> {
        self.skip_echoes();
        let io = tokio::io::join(io::Cursor::new(self.ahead).chain(self.read), self.write);
        let mut io = Some(TokioIo::new(io));
        let channel = Endpoint::from_static("http://guest")
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_header_list_size(MAX_HEADERS)
            .connect_with_connector(tower::service_fn(move |_| {
                let io = io.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
                async move { io }
            }))
            .await?;
        Ok(GuestClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
    }
}

/// Sends hellos until one is echoed. Returns the echo and the bytes read after it.
async fn shake<R, W>(read: &mut R, write: &mut W, ours: Hello) -> io::Result<(Hello, Vec<u8>)>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let wire = ours.encode();
    let mut scanner = Scanner::default();
    let mut buffer = vec![0; 16 << 10];
    let mut ticks = interval(REPEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // A partial hello would spoil what follows, so each hello starts where the last one ended.
    let mut left: &[u8] = &[];
    let mut seen = 0;
    loop {
        tokio::select! {
            biased;
            got = read.read(&mut buffer) => {
                let got = got?;
                if got == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                seen += got;
                if seen > MAX_RUBBISH {
                    return Err(io::Error::other("it keeps sending data, but no hello"));
                }
                for at in 0..got {
                    let Some(theirs) = scanner.push(buffer[at]) else { continue };
                    if theirs.nonce == ours.nonce {
                        write.write_all(left).await?;
                        return Ok((theirs, buffer[at + 1..got].to_vec()));
                    }
                }
            }
            sent = write.write(left), if !left.is_empty() => left = &left[sent?..],
            _ = ticks.tick(), if left.is_empty() => left = &wire,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ConnectError, Opened, shake};
    use crate::{
        gate,
        guest::{ThawUserReply, ThawUserRequest},
        handshake::{HELLO_LEN, Hello, OLDEST},
    };
    use std::time::Duration;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixStream,
    };
    use tonic::Code;

    #[tokio::test]
    async fn old_bytes_and_foreign_hellos_are_skipped_and_what_follows_is_kept() {
        let (node, mut guest) = UnixStream::pair().unwrap();
        let (mut read, mut write) = node.into_split();
        let ours = Hello::new(5, [8; 16]);
        let guest_side = async {
            guest.write_all(&[0xff; 1000]).await.unwrap();
            guest.write_all(&Hello::new(1, [7; 16]).encode()).await.unwrap();
            let mut wire = [0; HELLO_LEN];
            // Two repeats: the first hello may have gone to a guest that was not there yet.
            guest.read_exact(&mut wire).await.unwrap();
            guest.read_exact(&mut wire).await.unwrap();
            let hello = Hello::decode(&wire).unwrap();
            assert_eq!(hello, ours);
            let mut answer = Hello::new(4, hello.nonce).encode().to_vec();
            answer.extend_from_slice(b"SETTINGS");
            guest.write_all(&answer).await.unwrap();
        };
        let (met, ()) = tokio::join!(shake(&mut read, &mut write, ours), guest_side);
        let (theirs, rest) = met.unwrap();
        assert_eq!(theirs.generation, 4);
        assert_eq!(rest, b"SETTINGS");
    }

    #[tokio::test]
    async fn silence_and_a_closed_port_are_told_apart() {
        let (node, guest) = UnixStream::pair().unwrap();
        let error = Opened::open(node, 1, Duration::from_millis(60)).await.unwrap_err();
        assert!(matches!(error, ConnectError::Timeout(_)), "{error}");
        drop(guest);
        let (node, guest) = UnixStream::pair().unwrap();
        drop(guest);
        let error = Opened::open(node, 1, Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(error, ConnectError::Io(_)), "{error}");
    }

    /// Reads a hello, then sends `answer` to it, repeatedly.
    async fn insist(mut guest: UnixStream, answer: impl Fn(Hello) -> Vec<u8>) {
        let mut wire = [0; HELLO_LEN];
        guest.read_exact(&mut wire).await.unwrap();
        let wire = answer(Hello::decode(&wire).unwrap());
        if wire.is_empty() {
            let _ = guest.read_to_end(&mut Vec::new()).await;
            return;
        }
        while guest.write_all(&wire).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn hostile_agents_get_no_connection_and_a_bounded_time() {
        type Answer = Box<dyn Fn(Hello) -> Vec<u8>>;
        let damaged = |hello: Hello| {
            let mut wire = hello.encode();
            wire[63] ^= 1;
            wire.to_vec()
        };
        let answers: [(&str, Answer); 5] = [
            ("nothing", Box::new(|_| Vec::new())),
            ("another nonce", Box::new(|hello| Hello { nonce: [1; 16], ..hello }.encode().to_vec())),
            ("a bad checksum", Box::new(damaged)),
            ("half a hello", Box::new(|hello| hello.encode()[..40].to_vec())),
            ("rubbish", Box::new(|_| vec![0xff; 4096])),
        ];
        for (what, answer) in answers {
            let (node, guest) = UnixStream::pair().unwrap();
            let limit = Duration::from_millis(150);
            let started = std::time::Instant::now();
            let (met, ()) = tokio::join!(Opened::open(node, 1, limit), insist(guest, answer));
            let error = met.unwrap_err();
            assert!(matches!(error, ConnectError::Timeout(_)), "{what}: {error}");
            assert!(started.elapsed() < Duration::from_secs(5), "{what}: {:?}", started.elapsed());
        }
    }

    #[tokio::test]
    async fn bytes_without_end_are_given_up() {
        let (node, guest) = UnixStream::pair().unwrap();
        let (mut read, mut write) = node.into_split();
        let shaking = async {
            let met = shake(&mut read, &mut write, Hello::new(1, [2; 16])).await;
            drop((read, write));
            met
        };
        let (met, ()) = tokio::join!(shaking, insist(guest, |_| vec![0xff; 1 << 20]));
        assert!(met.unwrap_err().to_string().contains("but no hello"));
    }

    #[tokio::test]
    async fn an_agent_of_another_age_is_refused() {
        for (oldest, newest) in [(9, 9), (1, OLDEST - 1)] {
            let (node, mut guest) = UnixStream::pair().unwrap();
            let guest_side = async {
                let nonce = hear(&mut guest).await.nonce;
                let hello = Hello { version: newest, oldest, ..Hello::new(0, nonce) };
                guest.write_all(&hello.encode()).await.unwrap();
            };
            let (met, ()) = tokio::join!(Opened::open(node, 1, Duration::from_secs(5)), guest_side);
            let error = met.unwrap_err();
            assert!(
                matches!(error, ConnectError::Version { oldest: o, newest: n } if (o, n) == (oldest, newest))
            );
        }
    }

    async fn hear(guest: &mut UnixStream) -> Hello {
        let mut wire = [0; HELLO_LEN];
        guest.read_exact(&mut wire).await.unwrap();
        Hello::decode(&wire).unwrap()
    }

    /// A connection, and the other end of it, which has heard one hello.
    async fn opened() -> (Opened, UnixStream, Hello) {
        let (node, mut guest) = UnixStream::pair().unwrap();
        let guest_side = async {
            let hello = hear(&mut guest).await;
            guest.write_all(&hello.encode()).await.unwrap();
            hello
        };
        let (met, hello) = tokio::join!(Opened::open(node, 1, Duration::from_secs(5)), guest_side);
        (met.unwrap().0, guest, hello)
    }

    #[tokio::test]
    async fn a_second_answer_to_the_hello_is_passed_over() {
        let (mut opened, mut guest, hello) = opened().await;
        let reply = gate::reply(&Ok(ThawUserReply { micros: 3 }));
        let answer = [&hello.encode()[..], &hello.encode(), &reply].concat();
        let (one, other) = answer.split_at(100);
        guest.write_all(one).await.unwrap();
        let guest_side = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            guest.write_all(other).await.unwrap();
        };
        let (reply, ()) = tokio::join!(opened.call(&ThawUserRequest {}), guest_side);
        assert_eq!(reply.unwrap().micros, 3);
    }

    #[tokio::test]
    async fn what_is_no_reply_ends_a_call() {
        let foreign = Hello::new(1, [7; 16]).encode();
        for (sent, clue) in [
            (&foreign[..], "unknown reply code: 255"),
            (&[0xff, 0xff, 0xff, b'X'], "unknown reply code: 255"),
            (&[0, 0xff, 0xff, 0xff, 0xff], "a message of 4294967295 bytes"),
            (&[0, 2, 0, 0, 0, 8, 0xff], "malformed"),
            (&[13, 2, 0, 0, 0, b'n', b'o'], "no"),
        ] {
            let (mut opened, mut guest, _) = opened().await;
            let (reply, ()) = tokio::join!(opened.call(&ThawUserRequest {}), async {
                guest.write_all(sent).await.unwrap()
            });
            let error = reply.unwrap_err();
            assert!(error.message().contains(clue), "{sent:?}: {error}");
        }
        let (mut opened, guest, _) = opened().await;
        drop(guest);
        assert_eq!(opened.call(&ThawUserRequest {}).await.unwrap_err().code(), Code::Unavailable);
    }

    #[tokio::test]
    async fn an_answer_ahead_of_its_call_is_none() {
        let (mut opened, mut guest, _) = opened().await;
        let reply = gate::reply(&Ok(ThawUserReply { micros: 3 }));
        guest.write_all(&[&reply[..], &reply].concat()).await.unwrap();
        opened.call(&ThawUserRequest {}).await.unwrap();
        let error = opened.call(&ThawUserRequest {}).await.unwrap_err();
        assert!(error.message().contains("before it was asked"), "{error}");
    }

    #[tokio::test]
    async fn another_hello_begins_anew() {
        let (mut opened, mut guest, first) = opened().await;
        guest.write_all(b"left of the first").await.unwrap();
        let guest_side = async {
            let hello = hear(&mut guest).await;
            guest.write_all(&Hello { uptime_ms: 9, ..hello }.encode()).await.unwrap();
            hello.nonce
        };
        let (met, nonce) = tokio::join!(opened.meet(), guest_side);
        assert_eq!((met.unwrap().hello.uptime_ms, nonce == first.nonce), (9, false));
    }
}
