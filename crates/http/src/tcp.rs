//! A TCP connection to a port of a sandbox, over a WebSocket.
//!
//! Binary frames are bytes, both ways. The text frame `{"eof":true}` ends its sender's direction only, as a
//! half-closed TCP connection does; when both have ended the node closes. A connection that was reset ends with
//! `{"error":"…"}`; a client that leaves without `eof` resets it. A slow reader holds the other side up, nobody
//! else.

use super::{
    App,
    alive::{DEAD_AFTER, PING_EVERY, pings},
    errors,
    errors::Answer,
    extract::{PortPath, SandboxPath},
    responses::{Any, Asked, Guest, Named},
    sse,
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
use tracing::Instrument;

/// Largest message of a client.
const LARGEST: usize = 1 << 20;
/// Bytes of one message of ours.
const PIECE: usize = 32 << 10;

/// Connects to a TCP port inside the sandbox, over a WebSocket. Binary frames are bytes, both ways; the text frame
/// `{"eof":true}` ends its sender's direction. Wakes a hibernated sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/tcp/{port}", tag = "streams", operation_id = "tcp",
    params(("id" = String, Path, description = "The sandbox"), ("port" = u16, Path, description = "1 to 65535")),
    responses((status = 101, description = "The connection"), Any, Asked, Named, Guest,
        (status = 426, description = "Not a WebSocket request", body = ErrorBody),
        (status = 502, description = "Nothing listens on that port", body = ErrorBody)))]
pub(super) async fn tcp(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    PortPath(port): PortPath,
    upgrade: WebSocketUpgrade,
) -> Answer<Response> {
    let dialed = app.api.dial(id, port).await?;
    let span = tracing::Span::current();
    let upgrade = upgrade.max_message_size(LARGEST).max_frame_size(LARGEST);
    Ok(upgrade.on_upgrade(move |socket| serve(socket, dialed, app).instrument(span)))
}

async fn serve(socket: WebSocket, dialed: Dialed, app: App) {
    let (client, messages) = socket.split();
    let (from, to) = tokio::io::split(dialed);
    let ended = Ended::default();
    let both = async { tokio::try_join!(inward(messages, to, &ended), outward(from, client, &ended)) };
    tokio::select! {
        // Whoever was cut off has been told; what is left is dropped, and that resets the other side.
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
    // On to the end of the other direction: probes are answered here.
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
    // Whatever is sent: a client that only receives is alive by its answers.
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
                let body = ErrorBody { error: errors::sentence(&error), console: None };
                let _ = client.send(Message::Text(sse::ascii_json(&body).into())).await;
                let _ = client.close().await;
                return Err(Cut);
            }
        };
        client.send(message).await.map_err(|_| Cut)?;
    }
    client.send(Message::Text(r#"{"eof":true}"#.into())).await.map_err(|_| Cut)?;
    ended.outward.cancel();
    // The other direction may go on for long.
    while tokio::time::timeout(PING_EVERY, ended.inward.cancelled()).await.is_err() {
        client.send(Message::Ping(Bytes::new())).await.map_err(|_| Cut)?;
    }
    client.close().await.map_err(|_| Cut)
}
