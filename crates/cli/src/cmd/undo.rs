//! Creating something, and undoing it on a signal.

use crate::{exit::Failure, progress::Progress, signals::interrupted};
use keiki_client::{Client, Result};
use std::time::Duration;

/// How long to wait for the result of a request that was given up, to undo it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes something. If a signal arrives meanwhile, the result is undone.
pub async fn make_or_undo<T: Send + 'static>(
    client: &Client,
    doing: &str,
    make: impl Future<Output = Result<T>> + Send + 'static,
    undo: impl AsyncFnOnce(&Client, T) -> Result<()>,
) -> Result<T, Failure> {
    let progress = Progress::start(doing);
    let mut making = tokio::spawn(make);
    let signal = tokio::select! {
        done = &mut making => {
            let died = |_| Failure::Wrong(format!("{doing} ended early"));
            return Ok(done.map_err(died)??);
        }
        signal = interrupted() => signal,
    };
    progress.step(format!("interrupted while {doing}; cleaning up"));
    match tokio::time::timeout(PATIENCE, &mut making).await {
        Ok(Ok(Ok(made))) => undo(client, made).await?,
        Ok(_) => {}
        Err(_) => making.abort(),
    }
    Err(Failure::Signal(signal))
}
