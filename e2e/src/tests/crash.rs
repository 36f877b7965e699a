//! The daemon dies at the worst moment; machines and records survive.

use crate::{
    World,
    node::{Node, Options},
    patience,
    sandbox::Sandbox,
};
use anyhow::{Result, ensure};
use keiki_types::{
    Status,
    api::{CreateSandbox, ForkSandbox},
};
use std::{sync::Arc, time::Duration};

pub async fn a_killed_node_finds_its_machines_again(world: Arc<World>) -> Result<()> {
    let mut node = Node::start(&world.places, Options::named("found")).await?;
    node.bake().await?;
    let running = Sandbox::create(&node.client).await?;
    let paused = Sandbox::create(&node.client).await?;
    let asleep = Sandbox::create(&node.client).await?;
    for sandbox in [&running, &paused, &asleep] {
        sandbox.sh("echo kept > /dev/shm/x").await?;
    }
    let snapshot = running.snapshot().await?;
    running.background("sleep 77777").await?;
    node.client.pause(paused.id).await?;
    node.client.hibernate(asleep.id).await?;
    let generation = running.view().await?.generation;
    node.kill().await?;
    let node = node.restart().await?;
    let over = |sandbox: &Sandbox| Sandbox { client: node.client.clone(), id: sandbox.id };
    let (running, paused, asleep) = (over(&running), over(&paused), over(&asleep));

    ensure!(running.view().await?.generation == generation, "another copy");
    ensure!(running.sh("cat /dev/shm/x").await? == "kept", "running");
    ensure!(running.exec("pgrep -f 'sleep 7777[7]'").await?.exit_code == 0, "its process is gone");
    ensure!(paused.view().await?.status == Status::Paused, "no longer paused");
    node.client.resume(paused.id).await?;
    ensure!(paused.sh("cat /dev/shm/x").await? == "kept", "paused");
    ensure!(asleep.view().await?.status == Status::Hibernated, "no longer hibernated");
    ensure!(asleep.sh("cat /dev/shm/x").await? == "kept", "hibernated");
    ensure!(running.fork_one().await?.sh("cat /dev/shm/x").await? == "kept", "a fork after the crash");
    ensure!(
        Sandbox::restore(&node.client, &snapshot).await?.sh("cat /dev/shm/x").await? == "kept",
        "the snapshot"
    );
    node.finish().await
}

pub async fn killed_in_the_middle_of_everything(world: Arc<World>) -> Result<()> {
    let mut node = Node::start(&world.places, Options::named("killed")).await?;
    node.bake().await?;
    let keeper = Sandbox::create(&node.client).await?;
    keeper.sh("echo kept > /dev/shm/x").await?;
    let kept = keeper.snapshot().await?;
    let verbs = ["create", "snapshot", "fork", "hibernate"];
    for (round, delay) in [5, 40, 90, 160, 260, 400].into_iter().enumerate() {
        for verb in verbs {
            let (client, id) = (node.client.clone().with_retry_budget(Duration::ZERO), keeper.id);
            let under_way = tokio::spawn(async move {
                match verb {
                    "create" => client.create(&CreateSandbox::default()).await.map(drop),
                    "snapshot" => client.snapshot(id).await.map(drop),
                    "fork" => client
                        .fork(id, &ForkSandbox { count: Some(2), ..ForkSandbox::default() })
                        .await
                        .map(drop),
                    _ => client.hibernate(id).await.map(drop),
                }
            });
            tokio::time::sleep(Duration::from_millis(delay)).await;
            node.kill().await?;
            let acknowledged = under_way.await?.is_ok();
            node = node.restart().await?;
            check(&node, &keeper, verb, acknowledged).await.map_err(|error| {
                anyhow::anyhow!(
                    "{verb}, killed after {delay} ms (round {round}): {error:#}; the node says\n{}",
                    node.log_tail()
                )
            })?;
        }
    }
    let restored = Sandbox::restore(&node.client, &kept).await?;
    ensure!(restored.sh("cat /dev/shm/x").await? == "kept", "the snapshot from before all this");
    node.finish().await
}

/// The keeper still has its data, every listed sandbox works, and nothing else is on the host.
async fn check(node: &Node, keeper: &Sandbox, verb: &str, acknowledged: bool) -> Result<()> {
    let keeper = Sandbox { client: node.client.clone(), id: keeper.id };
    ensure!(keeper.sh("cat /dev/shm/x").await? == "kept", "the sandbox lost its memory");
    let others: Vec<_> =
        node.client.list(false).await?.into_iter().filter(|one| one.id != keeper.id).collect();
    let made = match verb {
        "create" => 1,
        "fork" => 2,
        _ => 0,
    };
    ensure!(others.is_empty() || others.len() == made, "{} of {made} sandboxes exist", others.len());
    ensure!(!acknowledged || others.len() == made, "acknowledged, but only {} of {made} exist", others.len());
    for other in &others {
        ensure!(other.status == Status::Running, "{} is {}", other.id, other.status);
        let other = Sandbox { client: node.client.clone(), id: other.id };
        other.sh("true").await?;
        other.kill().await?;
    }
    // Newest first: the last one is the one from before.
    let mut snapshots = node.client.snapshots(None).await?;
    let files = std::fs::read_dir(node.data.join("store/snapshots"))?.count();
    ensure!(files == snapshots.len(), "{files} directories of {} snapshots", snapshots.len());
    ensure!(std::fs::read_dir(node.data.join("store/scratch"))?.count() == 0, "scratch was left");
    snapshots.pop();
    ensure!(verb != "snapshot" || !acknowledged || snapshots.len() == 1, "an acknowledged snapshot is lost");
    for snapshot in snapshots {
        let restored = Sandbox::restore(&node.client, &snapshot).await?;
        ensure!(restored.sh("cat /dev/shm/x").await? == "kept", "a snapshot that survived is not whole");
        restored.kill().await?;
        node.client.delete_snapshot(snapshot.id).await?;
    }
    // VMs prepared ahead are replaced in the background: at most two besides the keeper.
    let mut traces = node.traces()?;
    for _ in 0..30 * patience() {
        if traces.monitors.len() <= 3 && traces.sandboxes <= 3 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        traces = node.traces()?;
    }
    anyhow::bail!("left behind: {traces:?}")
}
