//! `keiki restore`.

use super::create::{Life, create, shown};
use crate::{
    context::Context,
    exit::{Failure, Outcome},
};
use keiki_client::api::CreateSandbox;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub snapshot: String,
    /// How it lives.
    #[command(flatten)]
    pub life: Life,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    let ids = context.snapshot_ids(std::slice::from_ref(&args.snapshot)).await?;
    let id = ids.first().ok_or_else(|| Failure::Usage("a snapshot id is missing".into()))?;
    let request = CreateSandbox { from_snapshot: Some(id.to_string()), ..args.life.request() };
    let sandbox = create(&context.client, request).await?;
    shown(&context, &sandbox)
}
