//! `keiki rm`.

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome},
    progress::Progress,
};
use serde::Serialize;
use std::fmt::Display;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandboxes
    #[arg(value_name = "SANDBOX", required = true)]
    pub sandboxes: Vec<String>,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    let ids = context.sandbox_ids(&args.sandboxes).await?;
    let client = context.client.clone();
    remove_all(&context, &ids, move |id| {
        let client = client.clone();
        async move { client.delete(id).await }
    })
    .await
}

#[derive(Serialize)]
struct Removed<'a> {
    removed: &'a [String],
    failed: &'a [String],
}

/// Removes each; one that cannot be removed does not save the others, but is told in the end.
pub async fn remove_all<T, F>(context: &Context, ids: &[T], remove: impl Fn(T) -> F) -> Outcome
where
    T: Clone + Display,
    F: Future<Output = keiki_client::Result<()>>,
{
    let (mut removed, mut failed) = (Vec::new(), Vec::new());
    for id in ids {
        let progress = Progress::start(format!("removing {id}"));
        let outcome = remove(id.clone()).await;
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
    if context.out.is_json() {
        context.out.json(&Removed { removed: &removed, failed: &failed })?;
    }
    Ok(if failed.is_empty() { ExitCode::Success } else { ExitCode::Failed } as i32)
}
