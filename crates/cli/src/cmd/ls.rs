//! `keiki ls`.

use crate::{context::Context, exit::Outcome, ids::Shown, printer::table, text};
use keiki_client::{Status, api::Sandbox};
use time::OffsetDateTime;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub shown: Shown,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let sandboxes = context.client.list(!args.shown.quiet).await?;
    context.out.result(&sandboxes, || {
        args.shown.list(sandboxes.iter().map(|sandbox| sandbox.id), || {
            let now = OffsetDateTime::now_utc();
            let headings = ["ID", "TEMPLATE", "STATUS", "AGE", "TTL LEFT", "PRIVATE", "PARENT"];
            table(headings, sandboxes.iter().map(|sandbox| row(sandbox, now, &args.shown)))
        })
    })
}

fn row(sandbox: &Sandbox, now: OffsetDateTime, shown: &Shown) -> [String; 7] {
    let parent = match (sandbox.parent_sandbox_id, sandbox.from_snapshot) {
        (Some(id), _) => shown.id(id),
        (None, Some(id)) => format!("snapshot {}", shown.id(id)),
        (None, None) => "-".into(),
    };
    [
        shown.id(sandbox.id),
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
