//! `keiki snapshot`.

use super::{create::took, undo::make_or_undo};
use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    text,
};
use keiki_client::{Client, api::Snapshot};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let taker = context.client.clone();
    let taking = async move { taker.snapshot(id).await };
    let undo = async |client: &Client, taken: Snapshot| client.delete_snapshot(taken.id).await;
    let snapshot = make_or_undo(&context.client, "taking a snapshot", taking, undo).await?;
    context.out.show(&snapshot, || snapshot.id.to_string())?;
    if !context.out.is_json() {
        let timings = snapshot.timings.clone().unwrap_or_default();
        let size = text::bytes(snapshot.size_bytes);
        context.out.note(&format!("snapshot of {size} in {:.0} ms{}", timings.total_ms, took(&timings)));
    }
    Ok(ExitCode::Success as i32)
}
