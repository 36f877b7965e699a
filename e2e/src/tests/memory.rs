//! Host memory behind a guest: that it is reported, and that it shrinks.

use crate::{World, sandbox::Sandbox, within};
use anyhow::{Context, Result, ensure};
use keiki_types::api::MemoryUse;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// Seconds in which a guest must have given back what it freed.
const SHRINKS: u64 = 10;

async fn memory(sandbox: &Sandbox) -> Result<MemoryUse> {
    sandbox.view().await?.memory.context("no memory is shown")
}

pub async fn a_guest_that_frees_memory_shrinks(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let before = memory(&sandbox).await?;
    ensure!(before.guest_bytes == 256 * MIB, "{before:?}");
    ensure!(before.private_bytes + before.shared_bytes <= before.rss_bytes, "{before:?}");
    let hold = "b = b\"x\" * (128 << 20); open(\"/run/held\", \"w\"); import time; time.sleep(7777)";
    sandbox.background(&format!("python3 -c '{hold}'")).await?;
    sandbox.sh("until [ -e /run/held ]; do sleep 0.1; done").await?;
    let held = memory(&sandbox).await?;
    ensure!(held.private_bytes >= 128 * MIB, "128 MiB are held, and {held:?}");
    sandbox.sh("pkill -f 'sleep.777[7]'").await?;
    let freed = Instant::now();
    // Not all of it: Linux reports blocks of 2 MiB that are free as a whole.
    loop {
        let now = memory(&sandbox).await?;
        if now.private_bytes + 96 * MIB < held.private_bytes {
            break;
        }
        ensure!(freed.elapsed() < within(SHRINKS), "after {:?}: {held:?} is {now:?}", freed.elapsed());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // A copy of a shrunken machine is as small, and works.
    let copy = sandbox.fork_one().await?;
    ensure!(memory(&copy).await?.private_bytes < 64 * MIB, "{:?}", memory(&copy).await?);
    copy.sh("python3 -c 'b = b\"y\" * (128 << 20); assert b.count(b\"y\") == 128 << 20'").await?;
    Ok(())
}
