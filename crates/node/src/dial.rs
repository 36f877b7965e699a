//! Connections to ports inside a sandbox, over the agent channel: no network of the host has a part in it.

use crate::{
    error::{Error, Result},
    guest::{is_broken, plain, refusal, within},
    node::Node,
    sandbox::Use,
};
use bytes::{Buf, Bytes};
use futures::{Stream, StreamExt, stream};
use keiki_protocol::guest::DialChunk;
use keiki_types::SandboxId;
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, mpsc},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::PollSender;
use tonic::{Code, Status, Streaming};

/// Bytes sent at once.
const PIECE: usize = 32 << 10;
/// The guest gives up earlier by itself.
const CONNECT_LIMIT: Duration = Duration::from_secs(40);

/// A connection to a port of a guest. `shutdown` ends its own direction only; dropping it before both directions
/// have ended resets the connection. The sandbox is in use as long as it is held.
pub type Dialed = Box<dyn Duplex>;

/// Bytes both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

struct Connection {
    from: Streaming<DialChunk>,
    piece: Bytes,
    from_ended: bool,
    to: PollSender<DialChunk>,
    to_ended: bool,
    _using: Use,
    _stream: OwnedSemaphorePermit,
}

impl Node {
    /// Connects to a TCP port of a guest, on whichever of its own addresses something listens. Wakes the sandbox.
    ///
    /// # Errors
    /// 400 for port 0, 404, 409, 502 if nothing listens, 503 if too many streams are open.
    pub async fn dial(&self, id: SandboxId, port: u16) -> Result<Dialed> {
        if port == 0 {
            return Err(Error::Invalid("port must be from 1 to 65535, not 0".into()));
        }
        let using = self.inner.begin(id).await?;
        let permit = using.live.guest.stream()?;
        let (to, chunks) = mpsc::channel(1);
        let mut guest = using.live.guest.client().await;
        let mut answer = within(CONNECT_LIMIT, guest.dial(named(port, chunks))).await;
        let mut sender = to;
        if answer.as_ref().is_err_and(is_broken) {
            // Nothing was sent yet but the port.
            let (to, chunks) = mpsc::channel(1);
            sender = to;
            let mut guest = match using.live.guest.reconnect().await {
                Ok(guest) => guest,
                Err(error) => return Err(using.explain(error).await),
            };
            answer = within(CONNECT_LIMIT, guest.dial(named(port, chunks))).await;
        }
        match answer {
            Ok(answer) => Ok(Box::new(Connection {
                from: answer.into_inner(),
                piece: Bytes::new(),
                from_ended: false,
                to: PollSender::new(sender),
                to_ended: false,
                _using: using,
                _stream: permit,
            })),
            Err(status) => Err(using.explain(refused(&status)).await),
        }
    }
}

fn named(port: u16, chunks: mpsc::Receiver<DialChunk>) -> impl Stream<Item = DialChunk> + Send + 'static {
    let first = DialChunk { port: port.into(), ..DialChunk::default() };
    stream::iter([first]).chain(ReceiverStream::new(chunks))
}

fn refused(status: &Status) -> Error {
    match status.code() {
        Code::NotFound => Error::Unreachable(format!("{} in the sandbox", plain(status.message()))),
        _ => refusal(status),
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.piece.is_empty() && !self.from_ended {
            match ready!(self.from.poll_next_unpin(cx)) {
                Some(Ok(chunk)) => {
                    self.piece = chunk.data;
                    self.from_ended = chunk.eof;
                }
                Some(Err(status)) => return Poll::Ready(Err(cut(&plain(status.message())))),
                None => return Poll::Ready(Err(cut("the connection was cut off"))),
            }
        }
        let take = self.piece.len().min(buffer.remaining());
        buffer.put_slice(&self.piece[..take]);
        self.piece.advance(take);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.to_ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        ready!(self.to.poll_reserve(cx)).map_err(|_| cut("the connection was cut off"))?;
        let data = Bytes::copy_from_slice(&bytes[..bytes.len().min(PIECE)]);
        let taken = data.len();
        let sent = self.to.send_item(DialChunk { data, ..DialChunk::default() });
        Poll::Ready(sent.map(|()| taken).map_err(|_| cut("the connection was cut off")))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.to_ended {
            ready!(self.to.poll_reserve(cx)).map_err(|_| cut("the connection was cut off"))?;
            self.to_ended = true;
            let eof = DialChunk { eof: true, ..DialChunk::default() };
            self.to.send_item(eof).map_err(|_| cut("the connection was cut off"))?;
        }
        Poll::Ready(Ok(()))
    }
}

fn cut(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, why)
}
