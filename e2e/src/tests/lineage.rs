//! Which machine depends on which, and how deep a lineage may be.

use super::refused;
use crate::{
    World,
    node::{Node, Options},
    sandbox::Sandbox,
};
use anyhow::{Result, ensure};
use keiki_types::api::ForkSandbox;
use std::{sync::Arc, time::Duration};

pub async fn a_child_outlives_its_parent(world: Arc<World>) -> Result<()> {
    let parent = Sandbox::create(&world.node.client).await?;
    parent.sh("echo inherited > /root/a; echo inherited > /dev/shm/b; sync").await?;
    let children = parent.fork(2).await?;
    parent.kill().await?;
    for child in &children {
        child.sh("echo 3 > /proc/sys/vm/drop_caches").await?;
        ensure!(child.sh("cat /root/a /dev/shm/b").await? == "inherited\ninherited", "lost with the parent");
        child.sh("head -c 5M /dev/urandom > /root/new && sync && python3 -c 'print(1)'").await?;
    }
    children[0].kill().await?;
    children[1].sh("cat /root/new > /dev/null").await?;
    Ok(())
}

pub async fn a_fork_of_a_fork(world: Arc<World>) -> Result<()> {
    let mut line = vec![Sandbox::create(&world.node.client).await?];
    for depth in 0..3 {
        let last = &line[depth];
        last.sh(&format!("echo {depth} >> /root/trail; echo {depth} >> /dev/shm/trail; sync")).await?;
        let child = last.fork_one().await?;
        ensure!(child.view().await?.parent_sandbox_id == Some(last.id), "its parent is recorded wrong");
        line.push(child);
    }
    for (depth, member) in line.iter().enumerate() {
        let expected: Vec<String> = (0..=depth.min(2)).map(|n| n.to_string()).collect();
        for trail in ["/root/trail", "/dev/shm/trail"] {
            ensure!(
                member.sh(&format!("cat {trail}")).await? == expected.join("\n"),
                "{trail} at depth {depth}"
            );
        }
    }
    Ok(())
}

pub async fn a_snapshot_outlives_its_ancestors(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    parent.sh("echo parent > /root/who; sync").await?;
    let child = parent.fork_one().await?;
    child.sh("echo child > /root/who; echo warm > /dev/shm/warm; sync").await?;
    let snapshot = child.snapshot().await?;
    child.kill().await?;
    parent.kill().await?;
    let back = Sandbox::restore(client, &snapshot).await?;
    back.sh("echo 3 > /proc/sys/vm/drop_caches").await?;
    ensure!(back.sh("cat /root/who /dev/shm/warm").await? == "child\nwarm", "it lost something");
    // It also survives the deletion of the snapshot.
    client.delete_snapshot(snapshot.id).await?;
    back.sh("echo 3 > /proc/sys/vm/drop_caches; python3 -c 'import json'; git --version").await?;
    let again = back.fork_one().await?;
    again.sh("cat /root/who").await?;
    refused(client.get_snapshot(snapshot.id).await, 404, "no snapshot")
}

pub async fn chained_snapshots(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let mut current = Sandbox::create(client).await?;
    let mut ancestor = None;
    for cycle in 0..3 {
        current.sh(&format!("echo {cycle} >> /root/cycles; echo {cycle} >> /dev/shm/cycles")).await?;
        let snapshot = current.snapshot().await?;
        ensure!(snapshot.parent_snapshot_id == ancestor, "cycle {cycle}: wrong ancestor");
        ancestor = Some(snapshot.id);
        current.kill().await?;
        current = Sandbox::restore(client, &snapshot).await?;
    }
    for file in ["/root/cycles", "/dev/shm/cycles"] {
        ensure!(current.sh(&format!("cat {file}")).await? == "0\n1\n2", "{file}");
    }
    Ok(())
}

pub async fn many_children_at_once(world: Arc<World>) -> Result<()> {
    let parent = Sandbox::create(&world.node.client).await?;
    parent.sh("echo shared > /dev/shm/x").await?;
    let children = parent.fork(8).await?;
    let answers = futures::future::try_join_all(
        children
            .iter()
            .enumerate()
            .map(|(n, child)| async move { child.sh(&format!("cat /dev/shm/x; echo {n}")).await }),
    )
    .await?;
    for (n, answer) in answers.iter().enumerate() {
        ensure!(*answer == format!("shared\n{n}"), "{answer:?}");
    }
    ensure!(parent.sh("cat /dev/shm/x").await? == "shared", "the parent");
    Ok(())
}

pub async fn a_fork_is_all_or_nothing(world: Arc<World>) -> Result<()> {
    // Room for four machines.
    let options = Options::named("small").with(&["--memory-limit-mib", "1250"]);
    let node = Node::start(&world.places, options).await?;
    node.bake().await?;
    let client = node.client.clone().with_retry_budget(Duration::ZERO);
    let parent = Sandbox::create(&client).await?;
    let fork = |count| ForkSandbox { count: Some(count), ..ForkSandbox::default() };
    refused(client.fork(parent.id, &fork(0)).await, 400, "count")?;
    refused(client.fork(parent.id, &fork(65)).await, 400, "count")?;
    refused(client.fork(parent.id, &fork(8)).await, 507, "insufficient host memory")?;
    ensure!(client.list(false).await?.len() == 1, "children were left");
    ensure!(std::fs::read_dir(node.data.join("store/scratch"))?.count() == 0, "scratch was left");
    ensure!(parent.sh("echo fine").await? == "fine", "the parent");
    // What fits is created, and freed room can be used again.
    for child in parent.fork(3).await? {
        child.kill().await?;
    }
    parent.fork(3).await?;
    node.finish().await
}
