//! `keiki run`.

use super::{create, exec};
use crate::{
    context::Context,
    exit::{Failure, Outcome},
};
use keiki_client::api::CreateSandbox;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub options: exec::Options,
    #[command(flatten)]
    pub life: create::Life,
    /// Keep the sandbox afterwards and print its id to stderr
    #[arg(long)]
    pub keep: bool,
    /// Start from a snapshot instead of a template
    #[arg(long, value_name = "SNAPSHOT")]
    pub snapshot: Option<String>,
    /// Template to start from [default: base]
    #[arg(long, value_name = "TEMPLATE", conflicts_with = "snapshot")]
    pub template: Option<String>,
    #[command(flatten)]
    pub line: exec::Line,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let request = args.options.request(args.line).await?;
    let snapshot = match &args.snapshot {
        Some(text) => Some(context.snapshot_id(text).await?.to_string()),
        None => None,
    };
    let wanted = CreateSandbox { template: args.template, from_snapshot: snapshot, ..args.life.request() };
    let sandbox = create::create(&context.client, wanted).await?;
    let outcome = exec::carry_out(&context, sandbox.id, &request).await;
    if args.keep {
        context.out.note(&format!("kept sandbox {}", sandbox.id));
        return outcome;
    }
    match (context.client.delete(sandbox.id).await, outcome) {
        (Ok(()), outcome) => outcome,
        // Already gone.
        (Err(error), outcome) if error.is_not_found() => outcome,
        (Err(error), Ok(_)) => Err(Failure::Node(error)),
        (Err(error), outcome) => {
            context.out.note(&format!("keiki: cannot delete sandbox {}: {error}", sandbox.id));
            outcome
        }
    }
}
