//! States and time.

use super::{
    observe::{metric, metrics},
    refused,
};
use crate::{World, patience, sandbox::Sandbox};
use anyhow::{Result, ensure};
use futures::TryStreamExt;
use keiki_client::ExecEvent;
use keiki_types::{
    Status,
    api::{CreateSandbox, ExecRequest, SetLifecycle, execs::StartExec},
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
    refused(client.exec(sandbox.id, &echo()).await, 409, "is paused: resume it first")?;
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

/// Whatever asks for its files, or for a command's output as it comes, wakes it, and finds what was
/// written last. Asleep it has no machine, no slot, no memory.
pub async fn every_way_to_its_files_wakes_it(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    // VMs prepared ahead have slots, too, and machines of earlier tests may still be shutting down.
    for _ in 0..100 * patience() {
        let text = metrics(&world.node).await?;
        let prepared = metric(&text, r#"keiki_prestarted_machines{template="base"}"#);
        if prepared == Some(2.0) && metric(&text, "keiki_slots_used") == Some(3.0) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let tar = {
        client.write_bytes(id, "/root/packed/inner", None, "inner").await?;
        let chunks: Vec<_> = client.read_archive(id, "/root/packed").await?.try_collect().await?;
        bytes::Bytes::from(chunks.concat())
    };
    for (round, way) in
        ["read", "write", "list", "stat", "pack", "unpack", "stream", "watch"].into_iter().enumerate()
    {
        // Nothing is synced, and the hibernation comes at once.
        let last = format!("written last in round {round}");
        client.write_bytes(id, "/root/d/f", None, last.clone()).await?;
        sandbox.sh(&format!("echo {round} > /root/d/by-a-program")).await?;
        fall_asleep(&world, &sandbox).await?;
        if round == 0 {
            client.wake(id).await?;
            fall_asleep(&world, &sandbox).await?;
        }
        match way {
            "read" => {
                let read: Vec<_> = client.read_file(id, "/root/d/f").await?.chunks.try_collect().await?;
                ensure!(read.concat() == last.as_bytes(), "read {read:?}");
            }
            "write" => drop(client.write_bytes(id, "/root/d/g", None, "new").await?),
            "list" => {
                let names: Vec<_> =
                    client.list_dir(id, "/root/d").await?.into_iter().map(|e| e.name).collect();
                ensure!(names == ["by-a-program", "f", "g"], "{names:?}");
            }
            "stat" => ensure!(client.stat(id, "/root/d/f").await?.size == last.len() as u64, "its size"),
            "pack" => {
                let packed: Vec<_> = client.read_archive(id, "/root/d").await?.try_collect().await?;
                let packed = packed.concat();
                ensure!(
                    packed.windows(last.len()).any(|part| part == last.as_bytes()),
                    "it is not in the archive"
                );
            }
            "unpack" => {
                let whole = futures::stream::iter([Ok(tar.clone())]);
                let unpacked =
                    client.write_archive(id, "/root/d", keiki_client::Unpacking::default(), whole).await?;
                ensure!(unpacked.files == 1, "{unpacked:?}");
            }
            "stream" => {
                let said: Vec<_> = client.exec_stream(id, &echo()).await?.try_collect().await?;
                ensure!(said.first() == Some(&ExecEvent::Stdout("hi\n".into())), "{said:?}");
            }
            _ => {
                let mut events = client.watch(id, "/root/d", false).await?;
                ensure!(events.try_next().await?.is_some_and(|event| event.kind == "ready"), "not watched");
                sandbox.sh("echo x > /root/d/h").await?;
                ensure!(events.try_next().await?.is_some_and(|event| event.path == "/root/d/h"), "not told");
            }
        }
        let awake = sandbox.view().await?;
        ensure!(
            awake.status == Status::Running && awake.boot_mode == "wake",
            "{way} does not wake it: {awake:?}"
        );
        let kept = sandbox.sh("cat /root/d/f /root/d/by-a-program").await?;
        ensure!(kept == format!("{last}{round}"), "after a wake by {way}: {kept:?}");
    }
    ensure!(sandbox.sh("cat /root/d/g /root/d/packed/inner").await? == "newinner", "what woke it was lost");
    Ok(())
}

async fn fall_asleep(world: &World, sandbox: &Sandbox) -> Result<()> {
    const COSTS: [&str; 2] = ["keiki_slots_used", "keiki_memory_admitted_bytes"];
    let measure = async || -> Result<[f64; 2]> {
        let text = metrics(&world.node).await?;
        Ok(COSTS.map(|name| metric(&text, name).unwrap_or(f64::NAN)))
    };
    let (awake, monitors) = (measure().await?, world.node.monitors_of(sandbox.id)?);
    ensure!(!monitors.is_empty(), "it has no monitor while it runs");
    sandbox.client.hibernate(sandbox.id).await?;
    let asleep = measure().await?;
    ensure!(awake[0] - asleep[0] == 1.0, "slots: {} awake, {} asleep", awake[0], asleep[0]);
    ensure!(awake[1] - asleep[1] >= f64::from(256 << 20), "RAM: {} awake, {} asleep", awake[1], asleep[1]);
    // The process is gone, and all its pages.
    for pid in monitors {
        ensure!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "monitor {pid} is still there");
    }
    Ok(())
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
    // A background command with unread input does not keep it in use either.
    let unread = ExecRequest {
        cmd: Some("sleep 600".into()),
        stdin: Some("x".repeat(1 << 20)),
        ..ExecRequest::default()
    };
    client.start_exec(passing.id, &StartExec { command: unread, ..StartExec::default() }).await?;
    // A long command is activity all the time; a GET is not.
    ensure!(used.sh("sleep 4; echo done").await? == "done", "swept while in use");
    client.set_lifecycle(used.id, &SetLifecycle { ttl_seconds: Some(600), persistent: None }).await?;
    for _ in 0..20 * patience() {
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
    for _ in 0..50 * patience() {
        if sandbox.view().await?.status == Status::Failed {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let view = sandbox.view().await?;
    ensure!(view.status == Status::Failed, "it is {}", view.status);
    let error = view.error.unwrap_or_default();
    ensure!(error.contains("panic"), "the console's tail is missing: {error}");
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
