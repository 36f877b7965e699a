//! A secret of one sandbox is nowhere else: not in templates, not in snapshots; and a crash does
//! not lose it.

use crate::{
    World,
    node::{Node, Options},
    sandbox::Sandbox,
    within,
};
use anyhow::{Context, Result, ensure};
use keiki_client::Client;
use keiki_types::{
    SnapshotId,
    api::{
        CreateSandbox, ForkSandbox,
        secrets::{Fate, Secret},
    },
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A unique text.
fn token(of: &str) -> Result<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    Ok(format!("{of}-{}-{now}", std::process::id()))
}

fn secret(value: &str, on_restore: Option<Fate>) -> Secret {
    Secret { value: value.into(), owner: None, on_fork: None, on_restore }
}

async fn create(client: &Client, secrets: BTreeMap<String, Secret>) -> Result<Sandbox> {
    let request = CreateSandbox { secrets: Some(secrets), ..CreateSandbox::default() };
    Ok(Sandbox { client: client.clone(), id: client.create(&request).await?.id })
}

/// Whether a file contains this text, as another program finds it.
fn holds(file: &Path, text: &str) -> Result<bool> {
    let found = Command::new("grep").args(["-q", "-a", "-F", "-e", text]).arg(file).status()?;
    ensure!(matches!(found.code(), Some(0 | 1)), "grep failed on {}", file.display());
    Ok(found.success())
}

fn memory_of(node: &Node, snapshot: SnapshotId) -> PathBuf {
    node.data.join("store/snapshots").join(snapshot.to_string()).join("vm.mem")
}

/// It went through the channel, the agent and a file, and around each snapshot back and forth.
pub async fn nothing_of_a_dropped_secret_is_in_a_snapshot(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let (kept, dropped, later) = (token("kept")?, token("dropped")?, token("later")?);
    let given = BTreeMap::from([
        ("KEPT".to_owned(), secret(&kept, Some(Fate::Inherit))),
        // The default is to drop it.
        ("DROPPED".to_owned(), secret(&dropped, None)),
        ("LONG".to_owned(), secret(&format!("{}{dropped}", "x".repeat(60_000)), Some(Fate::Replace))),
    ]);
    let parent = create(client, given).await?;
    // No program reads it: a program that reads a secret has it.
    let there = "cd /run/keiki/secrets && for f in *; do stat -c '%n %s' $f; done";
    let sizes = format!("DROPPED {0}\nKEPT {1}\nLONG {2}", dropped.len(), kept.len(), 60_000 + dropped.len());
    ensure!(parent.sh(there).await? == sizes, "not as given");
    for turn in ["the first", "the second"] {
        let memory = memory_of(&world.node, parent.snapshot().await?.id);
        ensure!(
            holds(&memory, &kept)?,
            "{turn} snapshot has no secret, so this test looks in the wrong place"
        );
        ensure!(!holds(&memory, &dropped)?, "{turn} snapshot has a secret that is dropped");
    }
    // A child that gets one more.
    let more = BTreeMap::from([("LATER".to_owned(), secret(&later, None))]);
    let forked =
        client.fork(parent.id, &ForkSandbox { secrets: Some(more), ..ForkSandbox::default() }).await?;
    let child = Sandbox { client: client.clone(), id: forked.sandbox.id };
    let snapshot = child.snapshot().await?;
    let memory = memory_of(&world.node, snapshot.id);
    ensure!(holds(&memory, &kept)? && !holds(&memory, &later)? && !holds(&memory, &dropped)?, "the child's");
    // All of them are still in place, readable by their owner.
    let sum = format!("printf %s {later} | cmp - /run/keiki/secrets/LATER && ls /run/keiki/secrets | wc -l");
    ensure!(child.sh(&sum).await? == "4", "a secret was not put back");
    // The long one must be replaced, so a restore without it fails.
    let refused = Sandbox::restore(client, &snapshot).await.err().context("restored without LONG")?;
    ensure!(format!("{refused:#}").contains("LONG needs a new value"), "{refused:#}");
    // A template's memory never had a secret, so its sandboxes have none.
    for version in std::fs::read_dir(world.node.data.join("store/templates/base"))? {
        ensure!(!holds(&version?.path().join("vm.mem"), &kept)?, "a template has a secret");
    }
    let other = Sandbox::create(client).await?;
    ensure!(other.sh("ls /run/keiki/secrets 2>/dev/null | wc -l").await? == "0", "a new sandbox has secrets");
    Ok(())
}

/// While a snapshot is taken, only the node holds a secret that the snapshot must not have.
pub async fn a_node_killed_with_secrets_in_its_hands_gives_them_back(world: Arc<World>) -> Result<()> {
    let mut node = Node::start(&world.places, Options::named("secrets")).await?;
    node.bake().await?;
    let value = token("hush")?;
    let given = BTreeMap::from([("KEY".to_owned(), secret(&value, None))]);
    let id = create(&node.client, given).await?.id;
    let out = node.data.with_file_name("run").join(id.to_string().replace('-', "")).join("secrets");
    let is_long = std::env::var_os("KEIKI_E2E_LONG").is_some();
    // Already with the node and still in the machine; only with the node; in both again.
    for step in ["secrets:kept", "secrets:wiped", "secrets:back"] {
        if step != "secrets:wiped" && !is_long {
            continue;
        }
        node.kill().await?;
        node = node.restart_failing(Some(&format!("snapshot:{step}"))).await?;
        let client = node.client.clone().with_retry_budget(Duration::ZERO);
        ensure!(client.snapshot(id).await.is_err(), "the node did not die at {step}");
        ensure!(node.has_died(within(5)).await?, "the node lives on after {step}");
        ensure!(out.join("KEY").exists(), "after a death at {step} nothing is in {}", out.display());
        node = node.restart().await?;
        let sandbox = Sandbox { client: node.client.clone(), id };
        let seen = sandbox.sh("cat /run/keiki/secrets/KEY").await?;
        ensure!(seen == value, "after a death at {step} the secret is {seen:?}");
        ensure!(!out.exists(), "after a death at {step} the node still has it");
        ensure!(node.client.snapshots(None).await?.is_empty(), "half a snapshot is listed");
    }
    let sandbox = Sandbox { client: node.client.clone(), id };
    let restored = Sandbox::restore(&node.client, &sandbox.snapshot().await?).await?;
    ensure!(restored.sh("ls /run/keiki/secrets 2>/dev/null | wc -l").await? == "0", "a restore has it");
    node.finish().await
}
