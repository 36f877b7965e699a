//! The listener: connections with bounds on everything a client can hold open.
//!
//! A request's head must arrive whole in [`Limits::head`] and [`HEAD_BYTES`]; the same time ends an idle kept-alive
//! connection. Bodies have their own limits where they are read. A peer that vanished without a word is found by
//! TCP keep-alive, so that a command without a timeout does not run on for nobody.

use super::{App, routes};
use crate::Node;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};

/// How large it may be.
const HEAD_BYTES: usize = 64 << 10;
/// Connections served at once; more wait to be accepted.
const CONNECTIONS: usize = 4096;
/// Times that a client is given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// How long a request's head may take.
    pub head: Duration,
    /// How long requests may take to end when the node stops.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { head: Duration::from_secs(60), grace: Duration::from_secs(5) }
    }
}

/// Serves `/v1` until `shutdown` resolves, then lets running requests end for a few seconds.
///
/// # Errors
/// If the listener cannot be used.
pub async fn serve(node: Node, listener: TcpListener, shutdown: impl Future) -> io::Result<()> {
    serve_app(App::new(Arc::new(node)), listener, shutdown, Limits::default()).await
}

pub(super) async fn serve_app(
    app: App,
    listener: TcpListener,
    shutdown: impl Future,
    limits: Limits,
) -> io::Result<()> {
    listener.local_addr()?;
    let closing = app.closing.clone();
    let service = TowerToHyperService::new(routes(app));
    // Not hyper-util's automatic builder: it waits for the first bytes, to tell the versions apart, without a limit.
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            Some(_) = connections.join_next() => continue,
            _ = &mut shutdown => break,
        };
        let Some((stream, place)) = accepted else { continue };
        let connection = builder.serve_connection(TokioIo::new(stream), service.clone()).with_upgrades();
        let closing = closing.clone();
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

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            if let Err(error) = tune(&stream) {
                tracing::debug!("a connection could not be tuned: {error}");
            }
            Some((stream, place))
        }
        Err(error) => {
            // Out of descriptors, mostly: it passes, and trying again at once would only burn time.
            tracing::warn!("could not accept a connection: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
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
