//! `keiki snapshots`.

use super::rm::remove_all;
use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    ids::short,
    printer::table,
    text,
};
use keiki_client::api::Stale;
use time::OffsetDateTime;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    /// What to do; default: list.
    #[command(subcommand)]
    pub action: Option<Action>,
    /// The list.
    #[command(flatten)]
    pub list: List,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// List snapshots
    Ls(List),
    /// Remove snapshots; what was restored from them goes on
    Rm(Remove),
}

/// Arguments of the list.
#[derive(Debug, clap::Args)]
pub struct List {
    /// Only of this sandbox
    #[arg(long, value_name = "SANDBOX")]
    pub sandbox: Option<String>,
    /// Print whole ids only
    #[arg(short, long)]
    pub quiet: bool,
    /// Print whole ids in the table
    #[arg(long)]
    pub full: bool,
}

/// Arguments of remove.
#[derive(Debug, clap::Args)]
pub struct Remove {
    /// Snapshots
    #[arg(value_name = "SNAPSHOT", required = true)]
    pub snapshots: Vec<String>,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    match args.action {
        None => list(context, args.list).await,
        Some(Action::Ls(args)) => list(context, args).await,
        Some(Action::Rm(args)) => {
            let ids = context.snapshot_ids(&args.snapshots).await?;
            let client = context.client.clone();
            remove_all(&context, &ids, move |id| {
                let client = client.clone();
                async move { client.delete_snapshot(id).await }
            })
            .await
        }
    }
}

async fn list(context: Context, args: List) -> Outcome {
    let of = match &args.sandbox {
        // The sandbox may be gone: its snapshots are not.
        Some(text) => Some(match text.parse() {
            Ok(id) => id,
            Err(_) => context.sandbox_id(text).await?,
        }),
        None => None,
    };
    let snapshots = context.client.snapshots(of).await?;
    context.out.show(&snapshots, || {
        if args.quiet {
            let ids: Vec<String> = snapshots.iter().map(|snapshot| snapshot.id.to_string()).collect();
            return ids.join("\n");
        }
        let now = OffsetDateTime::now_utc();
        let name = |id: String| if args.full { id } else { short(id) };
        let rows = snapshots.iter().map(|snapshot| {
            [
                name(snapshot.id.to_string()),
                name(snapshot.sandbox_id.to_string()),
                snapshot.template.clone(),
                text::age(&snapshot.created_at, now),
                text::bytes(snapshot.size_bytes),
                snapshot.engine.to_string(),
                stale(&snapshot.stale),
            ]
        });
        table(["ID", "SANDBOX", "TEMPLATE", "AGE", "SIZE", "ENGINE", "STALE"], rows)
    })?;
    Ok(ExitCode::Success as i32)
}

/// Why it should be made anew, in a few words.
fn stale(why: &[Stale]) -> String {
    match why {
        [] => "-".into(),
        why => why.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}
