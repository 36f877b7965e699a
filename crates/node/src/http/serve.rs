//! The listener: connections with bounds on everything a client can hold open.
//!
//! A request's head must arrive whole in [`HEAD_TIME`] and [`HEAD_BYTES`]; the same time ends an idle kept-alive
//! connection. Bodies have their own limits where they are read. A peer that vanished without a word is found by
//! TCP keep-alive, so that a command without a timeout does not run on for nobody.

use super::{App, routes};
use crate::Node;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};

/// How long a request's head may take.
const HEAD_TIME: Duration = Duration::from_secs(60);
/// How large it may be.
const HEAD_BYTES: usize = 64 << 10;
/// Connections served at once; more wait to be accepted.
const CONNECTIONS: usize = 4096;
/// How long requests may take to end when the node stops.
const GRACE: Duration = Duration::from_secs(5);

/// Serves `/v1` until `shutdown` resolves, then lets running requests end for a few seconds.
///
/// # Errors
/// If the listener cannot be used.
pub async fn serve(node: Node, listener: TcpListener, shutdown: impl Future) -> io::Result<()> {
    serve_app(App::new(Arc::new(node)), listener, shutdown).await
}

pub(super) async fn serve_app(app: App, listener: TcpListener, shutdown: impl Future) -> io::Result<()> {
    listener.local_addr()?;
    let closing = app.closing.clone();
    let service = TowerToHyperService::new(routes(app));
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(HEAD_BYTES);
    let builder = Arc::new(builder);
    let graceful = GracefulShutdown::new();
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
        let (builder, service, watcher) = (builder.clone(), service.clone(), graceful.watcher());
        connections.spawn(async move {
            let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
            if let Err(error) = watcher.watch(connection.into_owned()).await {
                tracing::debug!("a connection ended: {error}");
            }
            drop(place);
        });
    }
    drop(listener);
    closing.cancel();
    if tokio::time::timeout(GRACE, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests were cut off: they did not end within {} s", GRACE.as_secs());
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
