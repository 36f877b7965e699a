//! A full disk.

use super::refused;
use crate::{
    World,
    node::{Node, Options},
    patience,
    sandbox::Sandbox,
    within,
};
use anyhow::{Context, Result, ensure};
use futures::future::{join_all, try_join_all};
use keiki_types::api::{CreateSandbox, ForkSandbox};
use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

pub async fn a_full_disk_refuses_and_loses_nothing(world: Arc<World>) -> Result<()> {
    let node = Node::start(&world.places, Options::named("full").store_gib(3)).await?;
    node.bake().await?;
    let client = node.client.clone().with_retry_budget(Duration::ZERO);
    let sandbox = Sandbox::create(&client).await?;
    sandbox.sh("echo kept > /dev/shm/x; echo kept > /root/y; sync").await?;
    let before = client.snapshots(None).await?.len();
    let ballast = node.data.join("store/ballast");
    fill(&ballast)?;
    refused(client.snapshot(sandbox.id).await, 507, "insufficient host storage")?;
    refused(client.fork(sandbox.id, &ForkSandbox::default()).await, 507, "insufficient host storage")?;
    refused(client.hibernate(sandbox.id).await, 507, "insufficient host storage")?;
    refused(client.create(&CreateSandbox::default()).await, 507, "insufficient host storage")?;
    ensure!(sandbox.sh("cat /dev/shm/x /root/y").await? == "kept\nkept", "the sandbox");
    ensure!(client.snapshots(None).await?.len() == before, "a snapshot that was refused is listed");
    ensure!(
        fs::read_dir(node.data.join("store/snapshots"))?.count() == before,
        "a refused snapshot left files"
    );
    ensure!(fs::read_dir(node.data.join("store/scratch"))?.count() == 0, "scratch was left");
    fs::remove_file(&ballast)?;
    // The file system frees the blocks in the background.
    for _ in 0..50 * patience() {
        if free(&node.data.join("store"))? > 1 << 30 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let snapshot = sandbox.snapshot().await?;
    ensure!(Sandbox::restore(&client, &snapshot).await?.sh("cat /dev/shm/x").await? == "kept", "afterwards");
    node.finish().await
}

/// Parallel requests near a full disk: each succeeds, or is rejected and creates nothing; none
/// fails halfway.
pub async fn room_is_promised_once(world: Arc<World>) -> Result<()> {
    let node = Node::start(&world.places, Options::named("near").store_gib(3)).await?;
    node.bake().await?;
    let client = node.client.clone().with_retry_budget(Duration::ZERO);
    let sandboxes = try_join_all((0..5).map(|_| Sandbox::create(&client))).await?;
    // Pages of a guest that a snapshot must write: half of its RAM.
    let dirty = "head -c 100M /dev/urandom > /dev/shm/dirty";
    try_join_all(sandboxes.iter().map(|sandbox| sandbox.sh(dirty))).await?;
    let ballast = node.data.join("store/ballast");
    // The node's reserve, and room for two of the five snapshots: each reserves all of a guest's
    // RAM.
    fill_but(&ballast, (256 + 2 * 272 + 100) << 20)?;
    let snapshots = join_all(sandboxes.iter().map(|sandbox| client.snapshot(sandbox.id))).await;
    let statuses: Vec<u16> = snapshots
        .iter()
        .map(|done| done.as_ref().map_or_else(|error| error.status().unwrap_or(0), |_| 201))
        .collect();
    println!("        five snapshots with room for two: {statuses:?}");
    ensure!(statuses.iter().all(|status| [201, 503, 507].contains(status)), "{statuses:?}");
    ensure!(statuses.contains(&201) && statuses.contains(&503), "{statuses:?}");
    let made = statuses.iter().filter(|status| **status == 201).count();
    ensure!(
        fs::read_dir(node.data.join("store/snapshots"))?.count() == made,
        "a refused snapshot left files"
    );
    for snapshot in snapshots.into_iter().flatten() {
        client.delete_snapshot(snapshot.id).await?;
    }
    let room = settled_free(&node.data.join("store")).await?.saturating_sub((256 + 40) << 20);
    let more = node.data.join("store/more-ballast");
    take(&more, room)?;
    let request = CreateSandbox::default();
    let creates = join_all((0..6).map(|_| client.create(&request))).await;
    let statuses: Vec<u16> = creates
        .iter()
        .map(|done| done.as_ref().map_or_else(|error| error.status().unwrap_or(0), |_| 201))
        .collect();
    println!("        six creates with room for two: {statuses:?}");
    ensure!(statuses.iter().all(|status| [201, 503, 507].contains(status)), "{statuses:?}");
    ensure!(statuses.iter().any(|status| *status != 201), "there was not room for all: {statuses:?}");
    for sandbox in &sandboxes {
        ensure!(sandbox.sh("stat -c %s /dev/shm/dirty").await? == "104857600", "a sandbox lost something");
    }
    for file in [ballast, more] {
        fs::remove_file(file)?;
    }
    node.finish().await
}

/// Free space, once it stops growing: deleted files go when the last process closes them.
async fn settled_free(dir: &std::path::Path) -> Result<u64> {
    let begun = Instant::now();
    let (mut last, mut same) = (free(dir)?, 0);
    while same < 5 && begun.elapsed() < within(15) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = free(dir)?;
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}

fn free(dir: &std::path::Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail * stat.f_frsize)
}

/// Fills the disk up to the last few MiB.
fn fill(ballast: &std::path::Path) -> Result<()> {
    fill_but(ballast, 8 << 20)
}

/// Fills the disk up to this many bytes.
fn fill_but(ballast: &std::path::Path, left: u64) -> Result<()> {
    let here = ballast.parent().context("no directory")?;
    take(ballast, free(here)?.saturating_sub(left))
}

fn take(ballast: &std::path::Path, size: u64) -> Result<()> {
    let file = fs::File::create(ballast)?;
    if size > 0 {
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size)?;
    }
    Ok(())
}
