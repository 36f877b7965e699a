//! Disk and memory of one instant: what `fsync` confirmed is in every copy, whenever it was taken.

use crate::{World, long, sandbox::Sandbox};
use anyhow::{Context, Result, ensure};
use std::{sync::Arc, time::Duration};

const LEDGER: &str = include_str!("../../guest/ledger.py");

/// Stops the writers, then checks the disk itself.
const CHECK: &str = "pkill -STOP python3; echo 3 >/proc/sys/vm/drop_caches; PATH=$PATH:/usr/sbin python3 /root/ledger.py check";
/// Read-only by the kernel's emergency key, then checked from the device itself.
const FSCK: &str = "pkill -KILL python3; sync; echo u >/proc/sysrq-trigger; sleep 0.3; echo 3 >/proc/sys/vm/drop_caches; \
    e2fsck -fn /dev/vda";

pub async fn what_was_acknowledged_is_in_every_copy(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    client.write_bytes(parent.id, "/root/ledger.py", None, LEDGER).await?;
    parent.background("exec python3 /root/ledger.py write 2>/dev/shm/failed").await?;
    parent.sh("for i in $(seq 100); do [ -s /root/rows.db-wal ] && exit 0; sleep 0.1; done; exit 1").await?;
    let mut before = (0, 0);
    for round in 0..if long() { 20 } else { 3 } {
        // A different, random moment each time.
        tokio::time::sleep(Duration::from_millis(500 + 137 * round % 400)).await;
        let copy = if round % 3 == 1 {
            let snapshot = parent.snapshot().await?;
            Sandbox::restore(client, &snapshot).await?
        } else {
            parent.fork_one().await?
        };
        let counts = copy.sh(CHECK).await.with_context(|| format!("copy {round}"))?;
        let (blocks, rows) = counts.split_once(' ').context("counts")?;
        let counts: (u32, u32) = (blocks.parse()?, rows.parse()?);
        ensure!(counts.1 > before.1, "{counts:?} after {before:?}: nothing was written");
        before = counts;
        copy.sh(FSCK).await.with_context(|| format!("the file system of copy {round}"))?;
        copy.kill().await?;
    }
    let failed = parent.sh("cat /dev/shm/failed").await?;
    ensure!(failed.is_empty(), "the original: {failed}");
    println!("        {} blocks and {} rows acknowledged at the last freeze", before.0, before.1);
    Ok(())
}
