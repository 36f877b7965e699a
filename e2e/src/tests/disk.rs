//! No room.

use super::refused;
use crate::{
    World,
    node::{Node, Options},
    sandbox::Sandbox,
};
use anyhow::{Result, ensure};
use keiki_types::api::{CreateSandbox, ForkSandbox};
use std::{fs, sync::Arc, time::Duration};

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
    // The file system gives the blocks back in the background.
    for _ in 0..50 {
        if free(&node.data.join("store"))? > 1 << 30 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let snapshot = sandbox.snapshot().await?;
    ensure!(Sandbox::restore(&client, &snapshot).await?.sh("cat /dev/shm/x").await? == "kept", "afterwards");
    node.finish().await
}

fn free(dir: &std::path::Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail * stat.f_frsize)
}

/// Takes all but the last few MiB.
fn fill(ballast: &std::path::Path) -> Result<()> {
    let file = fs::File::create(ballast)?;
    let stat = rustix::fs::fstatvfs(&file)?;
    let size = (stat.f_bavail * stat.f_frsize).saturating_sub(8 << 20);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size)?;
    Ok(())
}
