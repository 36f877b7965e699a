//! What commands share: one thing done to several sandboxes, and making that leaves nothing behind.

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome},
    progress::Progress,
    signals::{interrupted, unless_interrupted},
};
use keiki_client::{Client, Result, SandboxId, api::Sandbox};
use std::time::Duration;

/// Does `act` to each sandbox in turn, prints its id, stops at the first that fails.
pub async fn each<F: Future<Output = Result<Sandbox>>>(
    context: Context,
    texts: &[String],
    doing: &str,
    act: impl Fn(Client, SandboxId) -> F,
) -> Outcome {
    let mut done = Vec::new();
    for id in context.sandbox_ids(texts).await? {
        let progress = Progress::start(format!("{doing} {id}"));
        let sandbox = unless_interrupted(async { Ok(act(context.client.clone(), id).await?) }).await?;
        drop(progress);
        if !context.out.is_json() {
            context.out.line(&id.to_string())?;
        }
        done.push(sandbox);
    }
    if context.out.is_json() {
        context.out.json(&done)?;
    }
    Ok(ExitCode::Success as i32)
}

/// What was given up may be made all the same: how long to wait for it, to remove it.
const GIVE_UP: Duration = Duration::from_secs(30);

/// Makes something. If a signal comes meanwhile, what was made after all is undone.
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
            let ended = |_| Failure::Wrong(format!("{doing} ended early"));
            return Ok(done.map_err(ended)??);
        }
        signal = interrupted() => signal,
    };
    progress.step(format!("interrupted while {doing}; removing what is being made"));
    match tokio::time::timeout(GIVE_UP, &mut making).await {
        Ok(Ok(Ok(thing))) => undo(client, thing).await?,
        Ok(_) => {}
        Err(_) => making.abort(),
    }
    Err(Failure::Signal(signal))
}
