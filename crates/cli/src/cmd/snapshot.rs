//! `keiki snapshot`.

use super::{create::took, undo::make_or_undo};
use crate::{context::Context, exit::Outcome, text};
use keiki_client::{Client, api::Snapshot};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let taker = context.client.clone();
    let taking = async move { taker.snapshot(id).await };
    let undo = async |client: &Client, taken: Snapshot| client.delete_snapshot(taken.id).await;
    let snapshot = make_or_undo(&context.client, "taking a snapshot", taking, undo).await?;
    let timings = snapshot.timings.clone().unwrap_or_default();
    let size = text::bytes(snapshot.size_bytes);
    let how = format!("snapshot of {size} in {:.0} ms{}", timings.total_ms, took(&timings));
    context.out.made(&snapshot, || snapshot.id.to_string(), &how)
}
