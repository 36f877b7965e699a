//! Connections to ports inside a sandbox, over the agent channel, not over the host's network.

use crate::{
    error::{Error, Result},
    guest::link::{is_broken, plain, refusal, within},
    sandbox::Use,
};
use bytes::{Buf, Bytes};
use futures::{StreamExt, stream};
use keiki_api::Dialed;
use keiki_protocol::guest::{DialChunk, guest_client::GuestClient};
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
use tonic::{Code, Status, Streaming, transport::Channel};

/// Bytes per message.
const PIECE: usize = 32 << 10;
/// Time for an ended connection to deliver what was sent to it.
const LINGER: Duration = Duration::from_secs(60);
/// The guest gives up earlier.
const CONNECT_LIMIT: Duration = Duration::from_secs(40);

struct Connection {
    call: Option<Call>,
    piece: Bytes,
    from_ended: bool,
    to_ended: bool,
}

/// The call that carries it. Dropped in the middle, it resets the connection inside.
struct Call {
    from: Streaming<DialChunk>,
    to: PollSender<DialChunk>,
    _using: Use,
    _stream: OwnedSemaphorePermit,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(mut call) = self.call.take().filter(|_| self.from_ended && self.to_ended) else { return };
        // Everything is sent, but not everything delivered: the guest ends the call when it is.
        tokio::spawn(async move {
            let delivered =
                tokio::time::timeout(LINGER, async { while let Some(Ok(_)) = call.from.next().await {} });
            let _ = delivered.await;
        });
    }
}

/// Connects to a TCP port of a guest, on whichever of its addresses the port is open. 502 if
/// nothing listens, 503 if too many streams are open.
pub async fn dial(using: Use, port: u16) -> Result<Dialed> {
    let permit = using.live.guest.stream()?;
    let mut connected = connect(using.live.guest.client().await, port).await;
    if connected.as_ref().is_err_and(is_broken) {
        // Only the port has been sent so far.
        connected = match using.live.guest.reconnect().await {
            Ok(guest) => connect(guest, port).await,
            Err(error) => return Err(using.explain(error).await),
        };
    }
    match connected {
        Ok((from, to)) => {
            let call = Some(Call { from, to, _using: using, _stream: permit });
            Ok(Box::new(Connection { call, piece: Bytes::new(), from_ended: false, to_ended: false }))
        }
        Err(status) => Err(using.explain(refused(&status)).await),
    }
}

async fn connect(
    mut guest: GuestClient<Channel>,
    port: u16,
) -> Result<(Streaming<DialChunk>, PollSender<DialChunk>), Status> {
    let (to, chunks) = mpsc::channel(1);
    let first = DialChunk { port: port.into(), ..DialChunk::default() };
    let chunks = stream::iter([first]).chain(ReceiverStream::new(chunks));
    let from = within(CONNECT_LIMIT, guest.dial(chunks)).await?.into_inner();
    Ok((from, PollSender::new(to)))
}

fn refused(status: &Status) -> Error {
    match status.code() {
        Code::NotFound => Error::Unreachable(format!("{} in the sandbox", plain(status.message()))),
        _ => refusal(status),
    }
}

impl Connection {
    fn poll_send(&mut self, cx: &mut Context<'_>, chunk: impl FnOnce() -> DialChunk) -> Poll<io::Result<()>> {
        let gone = || cut("the connection was cut off");
        let Some(call) = &mut self.call else { return Poll::Ready(Err(gone())) };
        ready!(call.to.poll_reserve(cx)).map_err(|_| gone())?;
        Poll::Ready(call.to.send_item(chunk()).map_err(|_| gone()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.piece.is_empty() && !self.from_ended {
            let next = match &mut self.call {
                Some(call) => ready!(call.from.poll_next_unpin(cx)),
                None => None,
            };
            match next {
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
        let piece = &bytes[..bytes.len().min(PIECE)];
        ready!(
            self.poll_send(cx, || DialChunk { data: Bytes::copy_from_slice(piece), ..DialChunk::default() })
        )?;
        Poll::Ready(Ok(piece.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.to_ended {
            ready!(self.poll_send(cx, || DialChunk { eof: true, ..DialChunk::default() }))?;
            self.to_ended = true;
        }
        Poll::Ready(Ok(()))
    }
}

fn cut(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, why)
}
