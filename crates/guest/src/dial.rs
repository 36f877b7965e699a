//! TCP connections to ports of this machine, on behalf of the node.
//!
//! Each direction ends separately: `eof` is a half-close, and a stream that stops without one was
//! cut off, which the other end sees as a reset. Nothing is buffered here: data is read when there
//! is room for it.

use bytes::Bytes;
use keiki_protocol::{guest::DialChunk, net};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::mpsc,
    time::timeout,
};
use tonic::{Status, Streaming};

/// Bytes sent at once.
const PIECE: usize = 32 << 10;
/// A listener with a full queue answers late or never.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Connects to the port that the first chunk names.
pub async fn connect(chunks: &mut Streaming<DialChunk>) -> Result<TcpStream, Status> {
    let first = chunks.message().await?.unwrap_or_default();
    let port = u16::try_from(first.port).ok().filter(|&port| port > 0);
    let port = port.ok_or_else(|| Status::invalid_argument("the port must be from 1 to 65535"))?;
    let addresses: [IpAddr; 3] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into(), net::GUEST.into()];
    for address in addresses {
        match timeout(CONNECT_LIMIT, TcpStream::connect((address, port))).await {
            Ok(Ok(stream)) => {
                // Small writes are sent at once.
                stream
                    .set_nodelay(true)
                    .map_err(|error| Status::internal(format!("port {port}: {error}")))?;
                return Ok(stream);
            }
            // Nothing listens at this address, or the machine does not have it.
            Ok(Err(_)) => {}
            Err(_) => {
                return Err(Status::deadline_exceeded(format!("port {port} does not accept connections")));
            }
        }
    }
    Err(Status::not_found(format!("nothing listens on port {port}")))
}

/// Carries a connection until both directions have ended, one was cut off, or the caller is gone.
pub async fn carry(
    mut stream: TcpStream,
    chunks: Streaming<DialChunk>,
    sender: mpsc::Sender<Result<DialChunk, Status>>,
) {
    let (from, to) = stream.split();
    let both = async { tokio::try_join!(inward(chunks, to), outward(from, &sender)).map(drop) };
    let done = tokio::select! {
        done = both => done,
        () = sender.closed() => Err(Status::cancelled("the caller closed the connection")),
    };
    if let Err(status) = done {
        // The program inside sees a reset too.
        let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
        let _ = sender.try_send(Err(status));
    }
}

async fn inward(mut chunks: Streaming<DialChunk>, mut to: WriteHalf<'_>) -> Result<(), Status> {
    while let Some(chunk) = chunks.message().await? {
        to.write_all(&chunk.data).await.map_err(reset)?;
        if chunk.eof {
            return to.shutdown().await.map_err(reset);
        }
    }
    Err(Status::cancelled("the connection was cut off"))
}

async fn outward(
    mut from: ReadHalf<'_>,
    sender: &mpsc::Sender<Result<DialChunk, Status>>,
) -> Result<(), Status> {
    loop {
        let mut data = Vec::with_capacity(PIECE);
        // Reserve room before reading.
        let room =
            sender.reserve().await.map_err(|_| Status::cancelled("the caller closed the connection"))?;
        let got = from.read_buf(&mut data).await.map_err(reset)?;
        room.send(Ok(DialChunk { port: 0, data: Bytes::from(data), eof: got == 0 }));
        if got == 0 {
            return Ok(());
        }
    }
}

fn reset(error: io::Error) -> Status {
    Status::aborted(error.to_string())
}
