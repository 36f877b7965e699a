//! The node's half of a connection: the handshake over the agent port's socket, then a gRPC client on it.
//!
//! The socket may still deliver bytes of a connection that a frozen machine took with it, and the guest may
//! not be listening yet. So the hello is repeated until its echo comes, everything before the echo is thrown
//! away, and what follows it belongs to HTTP/2.
//!
//! A channel lasts as long as its socket. It never reconnects: when it fails, connect a new socket.

use crate::{
    MAX_CALLS,
    guest::guest_client::GuestClient,
    handshake::{Hello, Scanner, VERSION},
};
use hyper_util::rt::TokioIo;
use std::{
    io,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::UnixStream,
    time::{MissedTickBehavior, interval, timeout},
};
use tonic::transport::{Channel, Endpoint};

/// How often an unanswered hello is repeated.
const REPEAT: Duration = Duration::from_millis(25);
/// Output in flight per call. A guest keeps more than this behind what it sent, so that nothing is lost when
/// the connection is.
const STREAM_WINDOW: u32 = 256 << 10;
/// Output in flight altogether: what all calls may have, or those that nobody reads would hold up the others.
const CONNECTION_WINDOW: u32 = MAX_CALLS * STREAM_WINDOW;
/// What may come before the echo of a hello: what a frozen machine had in flight, with room to spare.
const MAX_RUBBISH: usize = 64 << 20;
/// Headers of one answer.
const MAX_HEADERS: u32 = 16 << 10;
/// The largest single message accepted from a guest.
pub const MAX_MESSAGE: usize = 16 << 20;

/// Why no connection came about.
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

/// The agent's answer to a hello.
#[derive(Debug, Clone, Copy)]
pub struct Met {
    /// What it says.
    pub hello: Hello,
    /// When our first hello was sent, and when the answer to one was read: it was written in between.
    pub asked: Instant,
    /// See there.
    pub answered: Instant,
}

/// Connects to the guest agent behind `stream`. `generation` is the one the guest is about to be given; the
/// hello returned tells the one it has. All of it is done or given up within `limit`.
///
/// # Errors
/// If the guest does not answer in time, speaks no common version, or the socket fails.
pub async fn connect(
    stream: UnixStream,
    generation: u64,
    limit: Duration,
) -> Result<(GuestClient<Channel>, Met), ConnectError> {
    timeout(limit, connect_unbounded(stream, generation)).await.map_err(|_| ConnectError::Timeout(limit))?
}

async fn connect_unbounded(
    stream: UnixStream,
    generation: u64,
) -> Result<(GuestClient<Channel>, Met), ConnectError> {
    let (mut read, mut write) = stream.into_split();
    let asked = Instant::now();
    let (hello, rest) = shake(&mut read, &mut write, Hello::new(generation, rand::random())).await?;
    let met = Met { hello, asked, answered: Instant::now() };
    if hello.agree().is_none() {
        return Err(ConnectError::Version { oldest: hello.oldest, newest: hello.version });
    }
    let io = tokio::io::join(io::Cursor::new(rest).chain(read), write);
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
    let client = GuestClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    Ok((client, met))
}

/// Says hello until it is echoed. Returns the echo and what was read behind it.
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
    // A hello cut short would spoil what follows it, so the next starts only where the last one ended.
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
                    return Err(io::Error::other("it sends bytes without end and no hello"));
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
    use super::{ConnectError, connect, shake};
    use crate::handshake::{HELLO_LEN, Hello};
    use std::time::Duration;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixStream,
    };

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
        let error = connect(node, 1, Duration::from_millis(60)).await.unwrap_err();
        assert!(matches!(error, ConnectError::Timeout(_)), "{error}");
        drop(guest);
        let (node, guest) = UnixStream::pair().unwrap();
        drop(guest);
        let error = connect(node, 1, Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(error, ConnectError::Io(_)), "{error}");
    }

    /// Reads a hello, then says `answer` of it, again and again.
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
            let (met, ()) = tokio::join!(connect(node, 1, limit), insist(guest, answer));
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
        assert!(met.unwrap_err().to_string().contains("without end"));
    }

    #[tokio::test]
    async fn an_agent_of_another_age_is_refused() {
        let (node, mut guest) = UnixStream::pair().unwrap();
        let guest_side = async {
            let mut wire = [0; HELLO_LEN];
            guest.read_exact(&mut wire).await.unwrap();
            let nonce = Hello::decode(&wire).unwrap().nonce;
            let hello = Hello { version: 9, oldest: 9, ..Hello::new(0, nonce) };
            guest.write_all(&hello.encode()).await.unwrap();
        };
        let (met, ()) = tokio::join!(connect(node, 1, Duration::from_secs(5)), guest_side);
        assert!(matches!(met.unwrap_err(), ConnectError::Version { oldest: 9, newest: 9 }));
    }
}
