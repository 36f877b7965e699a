//! `keiki ttl`.

use crate::{
    context::Context,
    exit::Outcome,
    text::{parse_ttl, span},
};
use keiki_client::api::SetLifecycle;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// New TTL, e.g. 30m: how long it may be idle; starts over
    #[arg(value_name = "TTL", value_parser = parse_ttl)]
    pub ttl: Option<i64>,
    /// Hibernate it when the TTL expires
    #[arg(long, conflicts_with = "ephemeral")]
    pub persistent: bool,
    /// Delete it when the TTL expires
    #[arg(long)]
    pub ephemeral: bool,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let persistent = (args.persistent || args.ephemeral).then_some(args.persistent);
    let lifecycle = if args.ttl.is_none() && persistent.is_none() {
        context.client.lifecycle(id).await?
    } else {
        context.client.set_lifecycle(id, &SetLifecycle { ttl_seconds: args.ttl, persistent }).await?
    };
    context.out.result(&lifecycle, || {
        let left = span(lifecycle.ttl_seconds.saturating_sub(lifecycle.idle_seconds));
        let end = if lifecycle.persistent { "hibernated" } else { "deleted" };
        format!("{end} after {} without activity, {left} left", span(lifecycle.ttl_seconds))
    })
}
