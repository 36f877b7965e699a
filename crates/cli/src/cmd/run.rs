//! `keiki run`.

use super::{create, exec};
use crate::{
    context::Context,
    exit::{Failure, Outcome},
};
use keiki_client::api::CreateSandbox;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How the command runs.
    #[command(flatten)]
    pub options: exec::Options,
    /// How the sandbox lives.
    #[command(flatten)]
    pub life: create::Life,
    /// Leave the sandbox there afterwards; its id goes to stderr
    #[arg(long)]
    pub keep: bool,
    /// Start from this snapshot, instead of TEMPLATE
    #[arg(long, value_name = "SNAPSHOT")]
    pub snapshot: Option<String>,
    /// A shell line, instead of COMMAND
    #[arg(short = 'c', long, value_name = "LINE", conflicts_with = "command")]
    pub shell: Option<String>,
    /// Template to start from
    #[arg(long, value_name = "TEMPLATE", conflicts_with = "snapshot")]
    pub template: Option<String>,
    /// Program and arguments
    #[arg(
        value_name = "COMMAND",
        required_unless_present = "shell",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub command: Vec<String>,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    let request = args.options.request(args.shell, args.command).await?;
    let snapshot = match &args.snapshot {
        Some(text) => {
            context.snapshot_ids(std::slice::from_ref(text)).await?.first().map(ToString::to_string)
        }
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
        // It ended by itself: gone is what was wanted.
        (Err(error), outcome) if error.is_not_found() => outcome,
        (Err(error), Ok(_)) => Err(Failure::Node(error)),
        (Err(error), outcome) => {
            context.out.note(&format!("keiki: sandbox {} could not be removed: {error}", sandbox.id));
            outcome
        }
    }
}
