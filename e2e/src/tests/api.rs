//! Invalid requests.

use super::refused;
use crate::{
    World,
    node::{Node, Options},
    sandbox::Sandbox,
};
use anyhow::{Result, ensure};
use keiki_types::{
    SandboxId, SnapshotId,
    api::{CreateSandbox, ExecRequest, ForkSandbox, ForkTree, Promote},
};
use std::{collections::BTreeMap, sync::Arc};

pub async fn requests_are_checked_and_named(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let with = |change: fn(&mut CreateSandbox)| {
        let mut request = CreateSandbox::default();
        change(&mut request);
        request
    };
    for (request, field) in [
        (with(|r| r.ttl_seconds = Some(0)), "ttl_seconds"),
        (with(|r| r.ttl_seconds = Some(-5)), "ttl_seconds"),
        (with(|r| r.memory_mb = Some(4096)), "memory_mb"),
        (with(|r| r.disk_mb = Some(4096)), "--disk 4096"),
        (with(|r| r.volumes = vec!["data".into()]), "volumes"),
        (with(|r| r.cpu = Some(3)), "template build base --cpu 3"),
        (with(|r| r.template = Some("../etc".into())), "template"),
        (with(|r| r.metadata = Some(BTreeMap::from([("k".into(), "v".repeat(9999))]))), "metadata"),
    ] {
        refused(client.create(&request).await, 400, field)?;
    }
    let sandbox = Sandbox::create(client).await?;
    for (request, words) in [
        (ExecRequest::default(), "cmd"),
        (
            ExecRequest { cmd: Some("x".into()), timeout_seconds: Some(0.0), ..ExecRequest::default() },
            "timeout_seconds",
        ),
        (
            ExecRequest {
                cmd: Some("x".into()),
                env: BTreeMap::from([("a=b".into(), "c".into())]),
                ..ExecRequest::default()
            },
            "env",
        ),
    ] {
        refused(client.exec(sandbox.id, &request).await, 400, words)?;
    }
    ensure!(client.list(false).await?.len() == 1, "a refused create left something");
    Ok(())
}

pub async fn unknown_things_are_404(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let nobody = SandboxId::new();
    refused(client.sandbox(nobody).await, 404, "no sandbox")?;
    refused(client.delete(nobody).await, 404, "no sandbox")?;
    refused(client.fork(nobody, &ForkSandbox::default()).await, 404, "no sandbox")?;
    refused(client.snapshot(nobody).await, 404, "no sandbox")?;
    refused(client.get_snapshot(SnapshotId::new()).await, 404, "no snapshot")?;
    let request = CreateSandbox { template: Some("never-made".into()), ..CreateSandbox::default() };
    refused(client.create(&request).await, 404, "never-made")?;
    let request =
        CreateSandbox { from_snapshot: Some(SnapshotId::new().to_string()), ..CreateSandbox::default() };
    refused(client.create(&request).await, 404, "no snapshot")
}

pub async fn a_key_is_required_where_one_is_set(world: Arc<World>) -> Result<()> {
    let keys = world.places.file("keys", "right-key\n")?;
    let node = Node::start(&world.places, Options::named("keyed").with(&["--api-key-file", &keys])).await?;
    let checked = async {
        refused(node.client.list(false).await, 401, "API key")?;
        refused(node.client.clone().with_api_key("wrong-key").list(false).await, 401, "API key")?;
        node.client.clone().with_api_key("right-key").list(false).await?;
        Ok(())
    };
    let done: Result<()> = checked.await;
    node.finish().await?;
    done?;
    // Without keys, and not on loopback: every request is rejected.
    let node = Node::start(&world.places, Options::named("open").listen("0.0.0.0:0")).await?;
    let done = refused(node.client.list(false).await, 401, "API key");
    node.finish().await?;
    done
}

pub async fn fork_tree_and_promote(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    let request = ForkTree {
        count: 3,
        metadata: Some(BTreeMap::from([("explore_ttl".into(), "600".into())])),
        ttl_seconds: None,
    };
    let tree = client.fork_tree(parent.id, &request).await?;
    ensure!(tree.children.len() == 3, "{} children", tree.children.len());
    for child in &tree.children {
        ensure!(child.metadata.get("fork_tree_id") == Some(&tree.tree_id), "{child:?}");
        ensure!(child.ttl_seconds == 600, "explore_ttl is the children's TTL");
    }
    let winner = tree.children[1].id;
    let promoted = client.promote(winner, &Promote { cleanup_siblings: true, tree_id: None }).await?;
    ensure!(promoted.deleted.len() == 2 && promoted.failures.is_empty(), "{promoted:?}");
    let mut left: Vec<_> = client.list(false).await?.into_iter().map(|sandbox| sandbox.id).collect();
    left.sort();
    ensure!(left == [parent.id, winner], "{left:?}");
    Ok(())
}
