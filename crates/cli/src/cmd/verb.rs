//! What commands that do one thing to several sandboxes share.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    progress::Progress,
    signals::unless_interrupted,
};
use keiki_client::{Client, Result, SandboxId, api::Sandbox};

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
