//! `keiki rm`.

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome},
    progress::Progress,
};
use keiki_client::{Client, Result};
use serde::Serialize;
use std::fmt::Display;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox ids
    #[arg(value_name = "SANDBOX", required = true)]
    pub sandboxes: Vec<String>,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let ids = context.sandbox_ids(&args.sandboxes).await?;
    remove_all(&context, &ids, async |client, id| client.delete(*id).await).await
}

#[derive(Serialize)]
struct Removed {
    removed: Vec<String>,
    failed: Vec<String>,
}

/// Deletes each of `ids`. A failure does not stop the others; the exit code reports it.
pub async fn remove_all<T: Display>(
    context: &Context,
    ids: &[T],
    remove: impl AsyncFn(&Client, &T) -> Result<()>,
) -> Outcome {
    let (mut removed, mut failed) = (Vec::new(), Vec::new());
    for id in ids {
        let progress = Progress::start(format!("deleting {id}"));
        let outcome = remove(&context.client, id).await;
        drop(progress);
        match outcome {
            Ok(()) => {
                if !context.out.is_json() {
                    context.out.line(&id.to_string())?;
                }
                removed.push(id.to_string());
            }
            Err(error) => {
                context.out.note(&format!("keiki: {id}: {}", Failure::Node(error).sentence()));
                failed.push(id.to_string());
            }
        }
    }
    let code = if failed.is_empty() { ExitCode::Success } else { ExitCode::Failed };
    if context.out.is_json() {
        context.out.json(&Removed { removed, failed })?;
    }
    Ok(code as i32)
}
