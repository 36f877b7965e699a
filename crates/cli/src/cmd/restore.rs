//! `keiki restore`.

use super::create::{Life, create, shown};
use crate::{context::Context, exit::Outcome};
use keiki_client::api::CreateSandbox;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Snapshot id
    pub snapshot: String,
    #[command(flatten)]
    pub life: Life,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.snapshot_id(&args.snapshot).await?;
    let request = CreateSandbox { from_snapshot: Some(id.to_string()), ..args.life.request() };
    let sandbox = create(&context.client, request).await?;
    shown(&context, &sandbox)
}
