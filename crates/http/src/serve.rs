//! The listener: bounds on everything that a client can hold open.
//!
//! A request's head must arrive within [`Limits::head`] and [`HEAD_BYTES`]; the same time limit ends an idle connection.
//! The HTTP library refuses a bad head itself, with 400, 414 or 431 and no body. Request bodies have their own limits where
//! they are read. TCP keep-alive finds a peer that vanished, so that a command without a timeout does not outlive its
//! caller. A connection beyond the limit gets a 503 instead of waiting.

use crate::{App, metrics::Metrics, proxy::Peer, router, sse::ascii_json};
use axum::{body::Body, extract::Request};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use keiki_api::Api;
use keiki_types::api::ErrorBody;
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};
use tower::Service;

/// Largest head of a request.
const HEAD_BYTES: usize = 64 << 10;
/// Connections that get a 503 at once; beyond that they are just closed.
const TURNED_AWAY: usize = 64;
/// How long a client may take to read its 503.
const FAREWELL: Duration = Duration::from_secs(2);

/// What clients may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections served at once.
    pub connections: usize,
    /// How long a request's head may take.
    pub head: Duration,
    /// How long running requests may take to end when the node stops.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 4096, head: Duration::from_secs(60), grace: Duration::from_secs(5) }
    }
}

/// Serves `/v1` until `shutdown` resolves, then lets running requests end for a few seconds.
///
/// # Errors
/// If the listener cannot be used.
pub async fn serve(api: Arc<dyn Api>, listener: TcpListener, shutdown: impl Future) -> io::Result<()> {
    serve_app(App::new(api), listener, shutdown, Limits::default()).await
}

pub(super) async fn serve_app(
    app: App,
    listener: TcpListener,
    shutdown: impl Future,
    limits: Limits,
) -> io::Result<()> {
    listener.local_addr()?;
    let (closing, metrics) = (app.closing.clone(), app.metrics.clone());
    let routes = router(app);
    // Not hyper-util's automatic builder: it waits without a limit for the first bytes, to detect the version.
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES);
    let places = Arc::new(Semaphore::new(limits.connections));
    let farewells = Arc::new(Semaphore::new(TURNED_AWAY));
    let mut connections = JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener) => accepted,
            Some(_) = connections.join_next() => continue,
            _ = &mut shutdown => break,
        };
        let Some((stream, peer)) = accepted else { continue };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            metrics.connection_refused();
            if let Ok(turn) = Arc::clone(&farewells).try_acquire_owned() {
                connections.spawn(turn_away(stream, turn));
            }
            continue;
        };
        let routes = routes.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(peer);
            routes.clone().call(request)
        });
        let connection = builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
        let (closing, counted) = (closing.clone(), Counted::new(metrics.clone()));
        connections.spawn(async move {
            tokio::pin!(connection);
            let ended = tokio::select! {
                ended = &mut connection => ended,
                () = closing.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!("a connection ended: {error}");
            }
            drop((counted, place));
        });
    }
    drop(listener);
    closing.cancel();
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.grace, all).await.is_err() {
        tracing::warn!("requests were cut off: they did not end within {:?}", limits.grace);
    }
    connections.shutdown().await;
    Ok(())
}

/// Counts a connection while it is open.
struct Counted(Metrics);

impl Counted {
    fn new(metrics: Metrics) -> Self {
        metrics.connection(1);
        Self(metrics)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connection(-1);
    }
}

async fn accept(listener: &TcpListener) -> Option<(TcpStream, Peer)> {
    match listener.accept().await {
        Ok((stream, peer)) => {
            if let Err(error) = tune(&stream) {
                tracing::debug!("a connection could not be tuned: {error}");
            }
            Some((stream, Peer(peer.ip())))
        }
        Err(error) => {
            // Usually out of descriptors: this passes, and trying again at once would only burn time.
            tracing::warn!("could not accept a connection: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

/// Answers 503 and reads until the client has seen it: closing with its request unread would reset the connection and lose
/// the answer.
async fn turn_away(mut stream: TcpStream, turn: OwnedSemaphorePermit) {
    let why = "the node has too many open connections; try again";
    let body = ascii_json(&ErrorBody { error: why.into(), console: None });
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         retry-after: 1\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let farewell = async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        let mut unread = [0; 4096];
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
    drop(turn);
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(15))?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    Ok(())
}
