//! `keiki version`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
};
use keiki_client::api::Version;
use serde::Serialize;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {}

#[derive(Serialize)]
struct Versions {
    client: &'static str,
    node: Option<Version>,
    url: String,
}

/// Runs the command. A node that does not answer is said, and no failure.
pub async fn run(context: Context, _: Args) -> Outcome {
    let (node, why) = match context.client.version().await {
        Ok(version) => (Some(version), String::new()),
        Err(error) => (None, error.to_string()),
    };
    let versions = Versions { client: env!("CARGO_PKG_VERSION"), node, url: context.client.url().to_owned() };
    context.out.show(&versions, || {
        let node = match &versions.node {
            Some(node) => format!("{} (engine {}) at {}", node.version, node.engine, versions.url),
            None => why,
        };
        format!("keiki {}\nnode  {node}", versions.client)
    })?;
    Ok(ExitCode::Success as i32)
}
