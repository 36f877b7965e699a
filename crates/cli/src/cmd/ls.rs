//! `keiki ls`.

use crate::{context::Context, exit::Outcome, ids::short, printer::table, text};
use keiki_client::{Status, api::Sandbox};
use time::OffsetDateTime;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print only whole ids
    #[arg(short, long)]
    pub quiet: bool,
    /// Show whole ids
    #[arg(long)]
    pub full: bool,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let sandboxes = context.client.list(!args.quiet).await?;
    context.out.result(&sandboxes, || {
        if args.quiet {
            let ids: Vec<String> = sandboxes.iter().map(|sandbox| sandbox.id.to_string()).collect();
            return ids.join("\n");
        }
        let now = OffsetDateTime::now_utc();
        let headings = ["ID", "TEMPLATE", "STATUS", "AGE", "TTL LEFT", "PRIVATE", "PARENT"];
        table(headings, sandboxes.iter().map(|sandbox| row(sandbox, now, args.full)))
    })
}

fn row(sandbox: &Sandbox, now: OffsetDateTime, full: bool) -> [String; 7] {
    let name = |id: String| if full { id } else { short(id) };
    let parent = match (sandbox.parent_sandbox_id, sandbox.from_snapshot) {
        (Some(id), _) => name(id.to_string()),
        (None, Some(id)) => format!("snapshot {}", name(id.to_string())),
        (None, None) => "-".into(),
    };
    [
        name(sandbox.id.to_string()),
        sandbox.template.clone(),
        sandbox.status.to_string(),
        text::age(&sandbox.created_at, now),
        ttl_left(sandbox),
        sandbox.memory.map_or_else(|| "-".into(), |memory| text::bytes(memory.private_bytes)),
        parent,
    ]
}

fn ttl_left(sandbox: &Sandbox) -> String {
    match sandbox.status {
        Status::Running | Status::Paused => {
            text::span(sandbox.ttl_seconds.saturating_sub(sandbox.idle_seconds))
        }
        _ => "-".into(),
    }
}
