//! The listener: connections with bounds on everything a client can hold open.
//!
//! A request's head must arrive whole in [`Limits::head`] and [`HEAD_BYTES`]; the same time ends an idle kept-alive
//! connection. Bodies have their own limits where they are read. A peer that vanished without a word is found by
//! TCP keep-alive, so that a command without a timeout does not run on for nobody. Where too many connections are open
//! a new one is told so with a 503, not left waiting: it is the node that is busy, whoever asks, so it is no 429.

use super::{
    App,
    proxy::Peer,
    refusals::{Answered, Spoken, by_hand},
    routes,
};
use crate::metrics::Metrics;
use axum::{body::Body, extract::Request, http::StatusCode};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use keiki_api::Api;
use std::{io, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};
use tower::Service;

/// How large it may be.
const HEAD_BYTES: usize = 64 << 10;
/// Connections that are being turned away at once; beyond that they are closed without a word.
const TURNED_AWAY: usize = 64;
/// How long one that is turned away may take to read why.
const FAREWELL: Duration = Duration::from_secs(2);

/// What clients are given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections served at once.
    pub connections: usize,
    /// How long a request's head may take.
    pub head: Duration,
    /// How long requests may take to end when the node stops.
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
    let routes = routes(app);
    // Not hyper-util's automatic builder: it waits for the first bytes, to tell the versions apart, without a limit.
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
        let answered = Answered::default();
        let stream = Spoken::new(stream, answered.clone());
        let routes = routes.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let answering = answered.begin();
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(peer);
            let answer = routes.clone().call(request);
            async move { answer.await.map(|response| answering.until_sent(response)) }
        });
        let connection = builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
        let (closing, metrics) = (closing.clone(), metrics.clone());
        connections.spawn(async move {
            let _counted = Counted::new(metrics);
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
            drop(place);
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
            // Out of descriptors, mostly: it passes, and trying again at once would only burn time.
            tracing::warn!("could not accept a connection: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

/// Says that there is no room, and reads until the client has heard it: closing with its request unread would reset
/// the connection, and take the answer with it.
async fn turn_away(mut stream: TcpStream, turn: OwnedSemaphorePermit) {
    let why = "the node has as many connections open as it serves; try again";
    let answer = by_hand(StatusCode::SERVICE_UNAVAILABLE, why, "retry-after: 1\r\n");
    let farewell = async {
        stream.write_all(&answer).await?;
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
