//! `keiki ttl`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    text::{parse_ttl, span},
};
use keiki_client::api::SetLifecycle;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// New time without use until it is deleted or hibernated, e.g. 30m; it begins anew
    #[arg(value_name = "TTL", value_parser = parse_ttl)]
    pub ttl: Option<i64>,
    /// Hibernate it when the time is over
    #[arg(long, conflicts_with = "ephemeral")]
    pub persistent: bool,
    /// Delete it when the time is over
    #[arg(long)]
    pub ephemeral: bool,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let persistent = (args.persistent || args.ephemeral).then_some(args.persistent);
    let lifecycle = if args.ttl.is_none() && persistent.is_none() {
        context.client.lifecycle(id).await?
    } else {
        context.client.set_lifecycle(id, &SetLifecycle { ttl_seconds: args.ttl, persistent }).await?
    };
    context.out.show(&lifecycle, || {
        let left = span(lifecycle.ttl_seconds.saturating_sub(lifecycle.idle_seconds));
        let end = if lifecycle.persistent { "hibernated" } else { "deleted" };
        format!("{end} after {} without use, {left} left", span(lifecycle.ttl_seconds))
    })?;
    Ok(ExitCode::Success as i32)
}
