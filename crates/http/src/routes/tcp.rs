//! A TCP connection to a port of a sandbox, over a WebSocket.
//!
//! Binary frames are bytes, both ways. The text frame `{"eof":true}` ends its sender's direction only, like a half-closed
//! TCP connection; when both have ended the node closes. A connection that was reset ends with `{"error":"…"}`; a client
//! that disconnects without `eof` resets it. A slow reader holds up only the other side of its connection.

use crate::{
    App,
    errors::Answer,
    extract::{PortPath, SandboxPath},
    responses::{AuthErrors, GuestErrors, NotFound, QueryErrors},
    websocket::{DEAD_AFTER, PING_EVERY, failure, pings, upgraded},
};
use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{Message, WebSocket},
    },
    response::Response,
};
use bytes::Bytes;
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use keiki_api::{Dialed, Error, Result};
use keiki_types::api::ErrorBody;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio_util::sync::CancellationToken;

/// Bytes in one message to the client.
const PIECE: usize = 32 << 10;

/// Connect to a TCP port in the sandbox, over a WebSocket. Binary frames are bytes, both ways; the text frame
/// `{"eof":true}` ends its sender's direction. Wakes a hibernated sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/tcp/{port}", tag = "streams", operation_id = "tcp",
    params(("id" = String, Path, description = "The sandbox"), ("port" = u16, Path, description = "1 to 65535")),
    responses((status = 101, description = "The connection"), AuthErrors, QueryErrors, NotFound, GuestErrors,
        (status = 426, description = "Not a WebSocket request", body = ErrorBody),
        (status = 502, description = "The port has no listener", body = ErrorBody)))]
pub(super) async fn tcp(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    PortPath(port): PortPath,
    upgrade: WebSocketUpgrade,
) -> Answer<Response> {
    let dialed = app.api.dial(id, port).await?;
    Ok(upgraded(upgrade, |socket| serve(socket, dialed, app)))
}

async fn serve(socket: WebSocket, dialed: Dialed, app: App) {
    let (client, messages) = socket.split();
    let (from, to) = tokio::io::split(dialed);
    let ended = Ended::default();
    let both = async { tokio::try_join!(inward(messages, to, &ended), outward(from, client, &ended)) };
    tokio::select! {
        // The side that was cut off knows it; dropping the rest resets the other one.
        _ = both => {}
        () = app.closing.cancelled() => {}
    }
}

/// One side is gone.
struct Cut;

/// Which direction has ended.
#[derive(Default)]
struct Ended {
    inward: CancellationToken,
    outward: CancellationToken,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Wish {
    Eof(bool),
}

async fn inward(
    mut messages: SplitStream<WebSocket>,
    mut to: WriteHalf<Dialed>,
    ended: &Ended,
) -> Result<(), Cut> {
    let is_over = || ended.inward.is_cancelled();
    // Continues to read until the other direction has ended: pings are answered here.
    loop {
        let next = tokio::select! {
            next = tokio::time::timeout(DEAD_AFTER, messages.next()) => next.map_err(|_| Cut)?,
            () = ended.outward.cancelled(), if is_over() => return Ok(()),
        };
        match next {
            Some(Ok(Message::Binary(bytes))) if !is_over() => to.write_all(&bytes).await.map_err(|_| Cut)?,
            Some(Ok(Message::Text(text))) if !is_over() => {
                let Ok(Wish::Eof(eof)) = serde_json::from_str(&text) else { return Err(Cut) };
                if eof {
                    to.shutdown().await.map_err(|_| Cut)?;
                    ended.inward.cancel();
                }
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            _ => return Err(Cut),
        }
    }
}

async fn outward(
    mut from: ReadHalf<Dialed>,
    mut client: SplitSink<WebSocket, Message>,
    ended: &Ended,
) -> Result<(), Cut> {
    // Pings even while data flows: a client that only receives shows by its answers that it is alive.
    let mut pings = pings();
    loop {
        let mut data = Vec::with_capacity(PIECE);
        let read = tokio::select! {
            read = from.read_buf(&mut data) => read,
            _ = pings.tick() => {
                client.send(Message::Ping(Bytes::new())).await.map_err(|_| Cut)?;
                continue;
            }
        };
        let message = match read {
            Ok(0) => break,
            Ok(_) => Message::Binary(data.into()),
            Err(error) => {
                let error = Error::Unreachable(format!("the connection inside was reset: {error}"));
                let _ = client.send(failure(&error)).await;
                let _ = client.close().await;
                return Err(Cut);
            }
        };
        client.send(message).await.map_err(|_| Cut)?;
    }
    client.send(Message::Text(r#"{"eof":true}"#.into())).await.map_err(|_| Cut)?;
    ended.outward.cancel();
    // The other direction may take long.
    while tokio::time::timeout(PING_EVERY, ended.inward.cancelled()).await.is_err() {
        client.send(Message::Ping(Bytes::new())).await.map_err(|_| Cut)?;
    }
    client.close().await.map_err(|_| Cut)
}
