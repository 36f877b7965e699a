//! What listens on port 80 of a fake sandbox: a web server that repeats what it was asked.

use axum::{
    Json, Router,
    body::Body,
    extract::{Request, WebSocketUpgrade, ws::Message},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::any,
};
use bytes::Bytes;
use futures::{StreamExt, stream};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use serde_json::{Value, json};
use std::convert::Infallible;
use tokio::io::DuplexStream;

/// Serves one connection.
pub(super) fn serve(far: DuplexStream) {
    let routes = Router::new()
        .route("/events", any(events))
        .route("/socket", any(socket))
        .route("/away", any(|| async { (StatusCode::FOUND, [(header::LOCATION, "/login")]) }))
        .route("/missing", any(|| async { (StatusCode::NOT_FOUND, "the guest's own words") }))
        .fallback(mirror);
    let service = TowerToHyperService::new(routes);
    let connection = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(far), service);
    tokio::spawn(connection.with_upgrades());
}

/// Says what it was asked.
async fn mirror(request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    let headers: serde_json::Map<String, Value> = parts
        .headers
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into()))
        .collect();
    let seen = json!({"method": parts.method.as_str(), "uri": parts.uri.to_string(), "headers": headers, "body": body.len()});
    ([(header::SET_COOKIE, "own=1; Domain=test")], Json(seen)).into_response()
}

async fn events() -> Response {
    let first = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"data: one\n\n"))]);
    let headers = [(header::CONTENT_TYPE, "text/event-stream")];
    (headers, Body::from_stream(first.chain(stream::pending()))).into_response()
}

async fn socket(headers: HeaderMap, upgrade: WebSocketUpgrade) -> Response {
    let origin =
        headers.get("origin").and_then(|value| value.to_str().ok()).map(str::to_owned).unwrap_or_default();
    upgrade.on_upgrade(|mut socket| async move {
        let _ = socket.send(Message::Text(origin.into())).await;
        while let Some(Ok(message)) = socket.next().await {
            if matches!(message, Message::Close(_)) || socket.send(message).await.is_err() {
                return;
            }
        }
    })
}
