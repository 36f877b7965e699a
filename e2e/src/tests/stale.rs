//! Stale snapshots are reported as such.

use super::refused;
use crate::{
    World,
    node::{Node, Options},
    sandbox::Sandbox,
    within,
};
use anyhow::{Context, Result, ensure};
use keiki_types::api::{CreateSandbox, Stale};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::process::Command;

/// Seconds after which a snapshot is marked as old, and rejected. Long, because the test restores
/// it before that.
const MAX_AGE: &str = "1s";
const REFUSE_AGE: u64 = 8;

pub async fn a_snapshot_says_why_it_should_be_made_anew(world: Arc<World>) -> Result<()> {
    let refuse = within(REFUSE_AGE);
    let ages = ["--snapshot-max-age", MAX_AGE, "--snapshot-refuse-age", &format!("{}s", refuse.as_secs())];
    let node = Node::start(&world.places, Options::named("stale").with(&ages)).await?;
    node.bake().await?;
    let keiki = async |args: &[&str]| {
        let mut program = Command::new(world.places.program("keiki"));
        let done = program.args(args).env("KEIKI_URL", node.client.url()).output().await?;
        ensure!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        anyhow::Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    };
    let sandbox = Sandbox::create(&node.client).await?;
    let snapshot = sandbox.snapshot().await?;
    // Its minimum age.
    let begun = Instant::now();
    ensure!(snapshot.stale.is_empty() && snapshot.age_seconds <= 1, "it is stale at once: {snapshot:?}");
    let kernel = sandbox.sh("uname -r").await?;
    ensure!(snapshot.kernel == kernel, "its kernel is {kernel}, not {:?}", snapshot.kernel);
    let template = node.client.template(&"base".parse()?).await?;
    ensure!(snapshot.template_version == template.version && template.kernel == kernel, "its template");
    let restored = Sandbox::restore(&node.client, &snapshot).await.context("a young one is restored")?;
    ensure!(restored.snapshot().await?.kernel == kernel, "a copy has another kernel");

    tokio::time::sleep(Duration::from_secs(2).saturating_sub(begun.elapsed())).await;
    let old = node.client.get_snapshot(snapshot.id).await?;
    ensure!(old.stale == [Stale::Old] && old.age_seconds >= 1, "{old:?}");
    keiki(&["template", "rebake", "base"]).await?;
    tokio::time::sleep((refuse + Duration::from_secs(1)).saturating_sub(begun.elapsed())).await;
    let old = node.client.get_snapshot(snapshot.id).await?;
    ensure!(old.stale == [Stale::TemplateRebuilt, Stale::Old, Stale::Refused], "{old:?}");
    let table = keiki(&["snapshots", "--full"]).await?;
    let line =
        table.lines().find(|line| line.contains(&snapshot.id.to_string())).context("it is not listed")?;
    ensure!(line.contains("template rebuilt, old, too old to restore"), "{table}");

    let words = "and this node does not restore snapshots older than";
    refused(node.client.restore(snapshot.id, CreateSandbox::default()).await, 409, words)?;
    // New snapshots have the new template's version.
    let fresh = Sandbox::create(&node.client).await?.snapshot().await?;
    ensure!(fresh.stale.is_empty() && fresh.template_version != snapshot.template_version, "{fresh:?}");
    Sandbox::restore(&node.client, &fresh).await?;
    node.finish().await
}
