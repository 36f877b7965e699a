//! `keiki pause`.

use super::verb::each;
use crate::{context::Context, exit::Outcome};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandboxes
    #[arg(value_name = "SANDBOX", required = true)]
    pub sandboxes: Vec<String>,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    each(context, &args.sandboxes, "pausing", |client, id| async move { client.pause(id).await }).await
}
