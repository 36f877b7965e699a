//! `keiki version`.

use crate::{context::Context, exit::Outcome};
use keiki_client::api::Version;
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub struct Args {}

#[derive(Serialize)]
struct Versions {
    client: &'static str,
    node: Option<Version>,
    url: String,
}

/// Succeeds even if the node does not answer.
pub async fn run(context: Context, _: Args) -> Outcome {
    let (node, why) = match context.client.version().await {
        Ok(version) => (Some(version), String::new()),
        Err(error) => (None, error.to_string()),
    };
    let versions = Versions { client: env!("CARGO_PKG_VERSION"), node, url: context.client.url().to_owned() };
    context.out.result(&versions, || {
        let node = match &versions.node {
            Some(node) => format!("{} (engine {}) at {}", node.version, node.engine, versions.url),
            None => why,
        };
        format!("keiki {}\nnode  {node}", versions.client)
    })
}
