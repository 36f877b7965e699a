//! Signals that end `keiki`.

use crate::exit::Failure;
use tokio::signal::unix::{SignalKind, signal};

/// Resolves with the number of the first of SIGINT, SIGTERM and SIGHUP. From the first call on they no longer
/// end the process by themselves.
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
        // None can be watched: each still ends the process by itself.
        return std::future::pending().await;
    }
    futures::future::select_all(waits).await.0
}

/// Runs `work` until it is done or a signal comes; then `work` is dropped.
pub async fn unless_interrupted<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::select! {
        done = work => done,
        signal = interrupted() => Err(Failure::Signal(signal)),
    }
}
