//! `keiki pause`, `resume`, `hibernate`, `wake`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    progress::Progress,
    signals::unless_interrupted,
};
use keiki_client::{Client, Result, SandboxId, api::Sandbox};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox ids
    #[arg(value_name = "SANDBOX", required = true)]
    sandboxes: Vec<String>,
}

/// Keeps sandboxes in memory, their vCPUs stopped.
pub async fn pause(context: Context, args: Args) -> Outcome {
    each(context, args, "pausing", async |client, id| client.pause(id).await).await
}

/// Resumes paused sandboxes.
pub async fn resume(context: Context, args: Args) -> Outcome {
    each(context, args, "resuming", async |client, id| client.resume(id).await).await
}

/// Saves sandboxes to disk and stops them.
pub async fn hibernate(context: Context, args: Args) -> Outcome {
    each(context, args, "hibernating", async |client, id| client.hibernate(id).await).await
}

/// Wakes hibernated sandboxes.
pub async fn wake(context: Context, args: Args) -> Outcome {
    each(context, args, "waking", async |client, id| client.wake(id).await).await
}

/// Acts on each sandbox in turn and prints its id; stops at the first failure.
async fn each(
    context: Context,
    args: Args,
    doing: &str,
    act: impl AsyncFn(&Client, SandboxId) -> Result<Sandbox>,
) -> Outcome {
    let mut done = Vec::new();
    for id in context.sandbox_ids(&args.sandboxes).await? {
        let progress = Progress::start(format!("{doing} {id}"));
        let sandbox = unless_interrupted(async { Ok(act(&context.client, id).await?) }).await?;
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
