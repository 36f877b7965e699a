//! What a node reports: events and metrics.

use crate::{
    World,
    node::{Node, Options},
    sandbox::Sandbox,
    within,
};
use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use keiki_client::Client;
use keiki_types::{
    SandboxId, Status,
    api::{CreateSandbox, Event, EventKind, SetLifecycle},
};
use std::{sync::Arc, time::Duration};

async fn kinds(client: &Client, id: SandboxId) -> Result<Vec<EventKind>> {
    Ok(client.events(Some(id), None, None).await?.iter().map(|event| event.kind).collect())
}

/// Waits for an event. Events of verbs that have returned are already there.
async fn wait_for(client: &Client, id: SandboxId, kind: EventKind) -> Result<Event> {
    let waiting = async {
        let mut events = client.follow_events(Some(id), Some(0)).await?;
        while let Some(event) = events.next().await {
            let event = event?;
            if event.kind == kind {
                return Ok(event);
            }
        }
        anyhow::bail!("the events ended without {kind:?}")
    };
    tokio::time::timeout(within(30), waiting).await.with_context(|| format!("no {kind:?}"))?
}

pub async fn events_tell_a_life(world: Arc<World>) -> Result<()> {
    use EventKind::{
        Created, Deleted, Expired, Failed, Forked, Frozen, Hibernated, Paused, Resumed, Running, Snapshotted,
        Woken,
    };
    let client = &world.node.client;
    let last = client.events(None, None, Some(1)).await?.last().map_or(0, |event| event.seq);
    let mut heard = client.follow_events(None, Some(last)).await?;
    let sandbox = Sandbox::create(client).await?;
    client.pause(sandbox.id).await?;
    client.resume(sandbox.id).await?;
    let snapshot = sandbox.snapshot().await?;
    let child = sandbox.fork_one().await?;
    client.hibernate(sandbox.id).await?;
    sandbox.sh("true").await?;
    sandbox.kill().await?;
    let told = kinds(client, sandbox.id).await?;
    let life = [
        Created,
        Running,
        Paused,
        Resumed,
        Frozen,
        Snapshotted,
        Frozen,
        Forked,
        Frozen,
        Hibernated,
        Woken,
        Deleted,
    ];
    ensure!(told == life, "{told:?}");
    let events = client.events(Some(sandbox.id), None, None).await?;
    ensure!(events[5].snapshot_id == Some(snapshot.id), "{:?}", events[5]);
    ensure!(
        events[7].children == [child.id] && events[6].ms.is_some_and(|ms| ms > 0.0),
        "{:?}",
        &events[6..8]
    );
    let of_child = client.events(Some(child.id), None, None).await?;
    ensure!(of_child[0].parent_sandbox_id == Some(sandbox.id), "{of_child:?}");
    // The live stream has them too, in the same order.
    let live = async {
        let mut mine = Vec::new();
        while mine.last() != Some(&Deleted) {
            let event = heard.next().await.context("the stream ended")??;
            if event.sandbox_id == sandbox.id {
                mine.push(event.kind);
            }
        }
        anyhow::Ok(mine)
    };
    let live = tokio::time::timeout(within(10), live).await.context("not told")??;
    ensure!(live == life, "{live:?}");
    // A machine that exits, and a TTL that expires.
    child.exec("echo b > /proc/sysrq-trigger").await.ok();
    let failed = wait_for(client, child.id, Failed).await?;
    ensure!(failed.reason.is_some_and(|reason| !reason.is_empty()), "without a reason");
    let idle = Sandbox::create(client).await?;
    client.set_lifecycle(idle.id, &SetLifecycle { ttl_seconds: Some(1), persistent: None }).await?;
    wait_for(client, idle.id, Expired).await?;
    wait_for(client, idle.id, Deleted).await.map(drop)
}

pub async fn a_sandbox_is_listed_while_it_is_made(world: Arc<World>) -> Result<()> {
    let client = world.node.client.clone();
    let sandbox = Sandbox::create(&client).await?;
    let making = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.fork(6).await }
    });
    let mut seen = 0;
    while !making.is_finished() {
        let creating =
            client.list(false).await?.iter().filter(|other| other.status == Status::Creating).count();
        seen = seen.max(creating);
    }
    making.await??;
    ensure!(seen == 6, "{seen} of 6 were listed while they were made");
    ensure!(client.list(false).await?.iter().all(|other| other.status == Status::Running), "all run");
    Ok(())
}

pub async fn events_survive_the_node(world: Arc<World>) -> Result<()> {
    let mut node = Node::start(&world.places, Options::named("events")).await?;
    node.bake().await?;
    let sandbox = Sandbox::create(&node.client).await?;
    let gone = Sandbox::create(&node.client).await?;
    gone.kill().await?;
    let before = node.client.events(None, None, None).await?;
    node.kill().await?;
    let node = node.restart().await?;
    let after = node.client.events(None, None, None).await?;
    ensure!(after.starts_with(&before), "{after:?}");
    ensure!(
        after.last().map(|event| (event.sandbox_id, event.kind)) == Some((sandbox.id, EventKind::Running)),
        "{after:?}"
    );
    ensure!(kinds(&node.client, gone.id).await?.last() == Some(&EventKind::Deleted), "of one that is gone");
    node.finish().await
}

/// A line's value.
pub fn metric(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

pub async fn metrics(node: &Node) -> Result<String> {
    Ok(reqwest::get(format!("{}/metrics", node.client.url())).await?.text().await?)
}

pub async fn metrics_count_what_happens(world: Arc<World>) -> Result<()> {
    let node = &world.node;
    let before = metrics(node).await?;
    let sandbox = Sandbox::create(&node.client).await?;
    let child = sandbox.fork_one().await?;
    let request = CreateSandbox { ttl_seconds: Some(0), ..CreateSandbox::default() };
    ensure!(node.client.create(&request).await.is_err(), "a TTL of 0");
    // Memory use is cached for a while.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let after = metrics(node).await?;
    let grown = |name: &str| metric(&after, name).unwrap_or(0.0) - metric(&before, name).unwrap_or(0.0);
    for (name, by) in [
        (r#"keiki_verb_seconds_count{verb="create"}"#, 1.0),
        (r#"keiki_verb_seconds_count{verb="fork"}"#, 1.0),
        (r#"keiki_verb_step_seconds_count{verb="fork",step="thaw"}"#, 1.0),
        (r#"keiki_verb_step_seconds_count{verb="fork",step="freeze_user"}"#, 1.0),
        (r#"keiki_vcpu_pause_seconds_count{verb="fork"}"#, 1.0),
        (r#"keiki_http_requests_total{method="POST",route="/v1/sandboxes",status="400"}"#, 1.0),
        (r#"keiki_sandbox_events_total{kind="forked"}"#, 1.0),
        (r#"keiki_sandboxes{state="running"}"#, 2.0),
    ] {
        ensure!(grown(name) == by, "{name} grew by {}", grown(name));
    }
    for name in
        ["keiki_memory_pss_bytes", "keiki_memory_private_bytes", "keiki_slots_used", "keiki_store_free_bytes"]
    {
        ensure!(metric(&after, name).is_some_and(|value| value > 0.0), "{name}");
    }
    ensure!(
        metric(&after, "keiki_memory_guest_bytes") == Some(f64::from(512 << 20)),
        "two guests of 256 MiB"
    );
    ensure!(metric(&after, "keiki_store_reserved_bytes") == Some(0.0), "nothing is under way");
    for id in [sandbox.id, child.id] {
        ensure!(!after.contains(&id.to_string()), "an id is in a label");
    }
    Ok(())
}
