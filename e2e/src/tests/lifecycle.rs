//! States and time.

use super::refused;
use crate::{World, sandbox::Sandbox};
use anyhow::{Result, ensure};
use futures::TryStreamExt;
use keiki_types::{
    Status,
    api::{CreateSandbox, ExecRequest, SetLifecycle},
};
use std::{sync::Arc, time::Duration};

fn echo() -> ExecRequest {
    ExecRequest { cmd: Some("echo hi".into()), ..ExecRequest::default() }
}

pub async fn paused_and_resumed(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let sandbox = Sandbox::create(client).await?;
    sandbox.sh("echo kept > /dev/shm/x").await?;
    ensure!(client.pause(sandbox.id).await?.status == Status::Paused, "not paused");
    ensure!(client.pause(sandbox.id).await?.status == Status::Paused, "pausing twice");
    refused(client.exec(sandbox.id, &echo()).await, 409, "sandbox not running (paused or hibernated)")?;
    let child = sandbox.fork_one().await?;
    ensure!(child.sh("cat /dev/shm/x").await? == "kept", "a child of a paused sandbox");
    ensure!(sandbox.view().await?.status == Status::Paused, "the fork woke its parent");
    ensure!(client.resume(sandbox.id).await?.status == Status::Running, "not resumed");
    ensure!(client.resume(sandbox.id).await?.status == Status::Running, "resuming twice");
    ensure!(sandbox.sh("cat /dev/shm/x").await? == "kept", "after resume");
    Ok(())
}

pub async fn hibernated_and_woken_by_use(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let sandbox = Sandbox::create(client).await?;
    for round in 0..2 {
        sandbox.sh(&format!("echo {round} >> /dev/shm/x; echo {round} >> /root/y")).await?;
        let asleep = client.hibernate(sandbox.id).await?;
        ensure!(asleep.status == Status::Hibernated && asleep.guest_ip.is_empty(), "{asleep:?}");
        ensure!(!world.node.has_monitor(sandbox.id)?, "its monitor still runs");
        ensure!(client.hibernate(sandbox.id).await?.status == Status::Hibernated, "hibernating twice");
        let expected: Vec<String> = (0..=round).map(|n| n.to_string()).collect();
        let expected = expected.join("\n");
        ensure!(sandbox.sh("cat /dev/shm/x").await? == expected, "memory after wake {round}");
        ensure!(sandbox.sh("cat /root/y").await? == expected, "disk after wake {round}");
        let awake = sandbox.view().await?;
        ensure!(awake.status == Status::Running && awake.boot_mode == "wake", "{awake:?}");
    }
    client.hibernate(sandbox.id).await?;
    ensure!(client.wake(sandbox.id).await?.status == Status::Running, "not woken");
    client.hibernate(sandbox.id).await?;
    sandbox.kill().await?;
    refused(client.sandbox(sandbox.id).await, 404, "no sandbox")
}

pub async fn the_ttl_deletes_or_hibernates(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let create = |persistent| CreateSandbox {
        ttl_seconds: Some(2),
        persistent: Some(persistent),
        ..CreateSandbox::default()
    };
    let passing = Sandbox { client: client.clone(), id: client.create(&create(false)).await?.id };
    let lasting = Sandbox { client: client.clone(), id: client.create(&create(true)).await?.id };
    let used = Sandbox { client: client.clone(), id: client.create(&create(false)).await?.id };
    // A long command is activity all the time; a GET is none.
    ensure!(used.sh("sleep 4; echo done").await? == "done", "swept while in use");
    client.set_lifecycle(used.id, &SetLifecycle { ttl_seconds: Some(600), persistent: None }).await?;
    for _ in 0..20 {
        if client.sandbox(passing.id).await.is_err() && lasting.view().await?.status == Status::Hibernated {
            break;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    refused(client.sandbox(passing.id).await, 404, "no sandbox")?;
    ensure!(lasting.view().await?.status == Status::Hibernated, "not hibernated");
    ensure!(lasting.sh("echo back").await? == "back", "not woken");
    let lifecycle = client.lifecycle(used.id).await?;
    ensure!(lifecycle.ttl_seconds == 600 && !lifecycle.persistent, "{lifecycle:?}");
    let child = used.fork_one().await?.view().await?;
    ensure!(child.ttl_seconds == 600 && child.idle_seconds <= 1, "forks inherit the TTL with a fresh clock");
    ensure!(Sandbox::create(client).await?.view().await?.ttl_seconds == 3600, "the default TTL is an hour");
    Ok(())
}

pub async fn a_guest_that_dies_is_reported(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let sandbox = Sandbox::create(client).await?;
    let bystander = Sandbox::create(client).await?;
    let _ = sandbox.exec("sync; echo c > /proc/sysrq-trigger").await;
    for _ in 0..50 {
        if sandbox.view().await?.status == Status::Failed {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let view = sandbox.view().await?;
    ensure!(view.status == Status::Failed, "it is {}", view.status);
    ensure!(view.error.is_some_and(|error| error.contains("panic")), "the console's tail is missing");
    let refusal = client.exec(sandbox.id, &echo()).await.err();
    let told =
        refusal.as_ref().and_then(keiki_client::Error::console).is_some_and(|tail| tail.contains("panic"));
    ensure!(told, "the refusal does not show the console: {refusal:?}");
    refused(client.exec(sandbox.id, &echo()).await, 409, "has failed")?;
    let logs: Vec<_> = client.logs(sandbox.id, keiki_client::LogStream::Both).await?.try_collect().await?;
    ensure!(String::from_utf8_lossy(&logs.concat()).contains("panic"), "its log does not tell");
    ensure!(bystander.sh("echo fine").await? == "fine", "another sandbox suffered");
    sandbox.kill().await
}
