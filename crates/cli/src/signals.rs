//! Signals that end `keiki`.

use crate::exit::Failure;
use tokio::signal::unix::{SignalKind, signal};

/// Resolves with the first of SIGINT, SIGTERM and SIGHUP to arrive. From the first call on they no
/// longer kill the process.
pub async fn interrupted() -> i32 {
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let waits = kinds.into_iter().filter_map(|kind| {
        let mut stream = signal(kind).ok()?;
        Some(Box::pin(async move {
            stream.recv().await;
            kind.as_raw_value()
        }))
    });
    let waits: Vec<_> = waits.collect();
    if waits.is_empty() {
        // No handler could be installed: each still kills the process.
        return std::future::pending().await;
    }
    futures::future::select_all(waits).await.0
}

/// Runs `work`, and drops it when a signal arrives.
pub async fn unless_interrupted<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::select! {
        done = work => done,
        signal = interrupted() => Err(Failure::Signal(signal)),
    }
}
