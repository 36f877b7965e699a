//! `keiki snapshots`.

use super::rm::remove_all;
use crate::{context::Context, exit::Outcome, ids::Shown, printer::table, text};
use keiki_client::api::Stale;
use time::OffsetDateTime;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    pub action: Option<Action>,
    #[command(flatten)]
    pub list: List,
}

#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// List snapshots
    Ls(List),
    /// Delete snapshots; sandboxes restored from them keep running
    Rm(Remove),
}

#[derive(Debug, clap::Args)]
pub struct List {
    /// Only snapshots of this sandbox
    #[arg(long, value_name = "SANDBOX")]
    pub sandbox: Option<String>,
    #[command(flatten)]
    pub shown: Shown,
}

#[derive(Debug, clap::Args)]
pub struct Remove {
    /// Snapshot ids
    #[arg(value_name = "SNAPSHOT", required = true)]
    pub snapshots: Vec<String>,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    match args.action {
        None => list(context, args.list).await,
        Some(Action::Ls(args)) => list(context, args).await,
        Some(Action::Rm(args)) => {
            let ids = context.snapshot_ids(&args.snapshots).await?;
            remove_all(&context, &ids, async |client, id| client.delete_snapshot(*id).await).await
        }
    }
}

async fn list(context: Context, args: List) -> Outcome {
    let of = match &args.sandbox {
        // Snapshots may outlive their sandbox.
        Some(text) => Some(match text.parse() {
            Ok(id) => id,
            Err(_) => context.sandbox_id(text).await?,
        }),
        None => None,
    };
    let snapshots = context.client.snapshots(of).await?;
    context.out.result(&snapshots, || {
        let now = OffsetDateTime::now_utc();
        let rows = snapshots.iter().map(|snapshot| {
            [
                args.shown.id(snapshot.id),
                args.shown.id(snapshot.sandbox_id),
                snapshot.template.clone(),
                text::age(&snapshot.created_at, now),
                text::bytes(snapshot.size_bytes),
                snapshot.engine.to_string(),
                stale(&snapshot.stale),
            ]
        });
        let headings = ["ID", "SANDBOX", "TEMPLATE", "AGE", "SIZE", "ENGINE", "STALE"];
        args.shown.list(snapshots.iter().map(|snapshot| snapshot.id), || table(headings, rows))
    })
}

fn stale(why: &[Stale]) -> String {
    match why {
        [] => "-".into(),
        why => why.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}
