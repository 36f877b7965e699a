//! `keiki fork`.

use super::{create::took, undo::make_or_undo};
use crate::{
    context::Context,
    exit::Outcome,
    text::{map, parse_pair, parse_secret, parse_ttl},
};
use keiki_client::{
    Client,
    api::{ForkSandbox, Forked, MAX_FORK, secrets::Secret},
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// Number of children, all forked at the same instant
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..=MAX_FORK))]
    pub count: i64,
    /// Delete a child after this long without activity [default: the parent's TTL]
    #[arg(long, value_name = "DURATION", value_parser = parse_ttl)]
    pub ttl: Option<i64>,
    /// Label the children; repeat for more [default: the parent's labels]
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub metadata: Vec<(String, String)>,
    /// Pass a secret to the children, from environment variable NAME or a file
    #[arg(long = "secret", value_name = "NAME[=@FILE]", value_parser = parse_secret)]
    pub secrets: Vec<(String, Secret)>,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let request = ForkSandbox {
        count: Some(args.count),
        metadata: map(args.metadata),
        ttl_seconds: args.ttl,
        secrets: map(args.secrets),
    };
    let maker = context.client.clone();
    let making = async move { maker.fork(id, &request).await };
    let undo = async |client: &Client, forked: Forked| {
        for child in forked.children {
            client.delete(child.id).await?;
        }
        Ok(())
    };
    let forked = make_or_undo(&context.client, "forking", making, undo).await?;
    let ids: Vec<String> = forked.children.iter().map(|child| child.id.to_string()).collect();
    let timings = &forked.timings;
    let how = format!("forked {} in {:.0} ms{}", ids.len(), timings.total_ms, took(timings));
    context.out.made(&forked, || ids.join("\n"), &how)
}
