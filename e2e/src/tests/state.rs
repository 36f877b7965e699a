//! What a copy has: everything its original had at that instant, and nothing from later.

use crate::{World, sandbox::Sandbox};
use anyhow::{Result, ensure};
use std::sync::Arc;

/// A process that counts in its memory, and shows the count in a file on tmpfs.
const COUNTER: &str = "python3 -c '
import os, time
n = 0
while True:
    n += 1
    with open(\"/dev/shm/count.new\", \"w\") as f: f.write(str(n))
    os.rename(\"/dev/shm/count.new\", \"/dev/shm/count\")
    time.sleep(0.05)
'";

async fn count(sandbox: &Sandbox) -> Result<u64> {
    Ok(sandbox.sh("cat /dev/shm/count").await?.parse()?)
}

pub async fn memory_tmpfs_and_disk_are_carried_by_fork_and_restore(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    parent.background(COUNTER).await?;
    parent
        .sh("head -c 3000000 /dev/urandom > /root/on-disk; head -c 2000000 /dev/urandom > /dev/shm/in-memory")
        .await?;
    parent.sh("for i in $(seq 100); do [ -s /dev/shm/count ] && exit 0; sleep 0.1; done; exit 1").await?;
    let hashes = "sha256sum /root/on-disk /dev/shm/in-memory | cut -c1-64 | tr '\\n' ' '";
    let (before, pid) = (parent.sh(hashes).await?, parent.sh("pgrep -f count.new | head -1").await?);
    let low = count(&parent).await?;

    let child = parent.fork_one().await?;
    let snapshot = parent.snapshot().await?;
    parent.sh("sleep 2").await?;
    let later = count(&parent).await?;
    let restored = Sandbox::restore(client, &snapshot).await?;
    let again = count(&restored).await?;
    ensure!(
        again < later,
        "the restored one is at {again}: not where the snapshot was, which the original left for {later}"
    );
    for copy in [&child, &restored] {
        ensure!(copy.sh(hashes).await? == before, "other contents");
        ensure!(copy.sh("pgrep -f count.new | head -1").await? == pid, "the process has another pid");
        let first = count(copy).await?;
        ensure!(first >= low, "it counts from {first}, the original was at {low}");
        copy.sh("sleep 0.5").await?;
        ensure!(count(copy).await? > first, "the process does not go on");
    }
    Ok(())
}

pub async fn unsynced_writes_are_of_the_same_instant(world: Arc<World>) -> Result<()> {
    let parent = Sandbox::create(&world.node.client).await?;
    // A log on disk and its length in memory must agree in every copy, whenever it was taken.
    parent
        .background(
            "python3 -c '
import os
n = 0
with open(\"/root/log\", \"ab\", buffering=0) as log:
    while True:
        n += 1
        log.write(b\"%08d\\n\" % n)
        if n % 50 == 0: os.fsync(log.fileno())
        with open(\"/dev/shm/n\", \"w\") as f: f.write(str(n))
'",
        )
        .await?;
    parent.sh("for i in $(seq 100); do [ -s /dev/shm/n ] && exit 0; sleep 0.1; done; exit 1").await?;
    for _ in 0..3 {
        let child = parent.fork_one().await?;
        child.sh("pkill python3; sleep 0.2; true").await?;
        let out = child
            .sh("python3 -c \"t = open('/root/log').read().split(); n = open('/dev/shm/n').read(); print(n or 0, len(t), int(t[-1]))\"")
            .await?;
        let numbers: Vec<u64> = out.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [shown, lines, last] = numbers[..] else { anyhow::bail!("{out:?}") };
        ensure!(lines == last, "the log has {lines} lines and ends with {last}");
        // The counter file is rewritten after the line: at most one behind (or just truncated).
        ensure!(shown == 0 || lines == shown || lines == shown + 1, "memory says {shown}, disk {lines}");
        child.kill().await?;
    }
    Ok(())
}

pub async fn divergence_never_leaks(world: Arc<World>) -> Result<()> {
    let parent = Sandbox::create(&world.node.client).await?;
    parent.sh("head -c 50M /dev/urandom > /root/shared && sync").await?;
    let children = parent.fork(2).await?;
    let all: Vec<&Sandbox> = std::iter::once(&parent).chain(&children).collect();
    for (n, copy) in all.iter().enumerate() {
        // Each overwrites the shared file, adds a private one, and keeps their hashes in memory.
        copy.sh(&format!(
            "echo {n} > /dev/shm/me; head -c 50M /dev/urandom > /root/shared; head -c 10M /dev/urandom > /root/own-{n}; sync; \
             sha256sum /root/shared /root/own-{n} > /dev/shm/sums"
        ))
        .await?;
    }
    let mut seen = Vec::new();
    for (n, copy) in all.iter().enumerate() {
        copy.sh("echo 3 > /proc/sys/vm/drop_caches").await?;
        copy.sh("sha256sum --check --quiet /dev/shm/sums").await?;
        ensure!(copy.sh("cat /dev/shm/me").await? == n.to_string(), "its memory was changed");
        ensure!(copy.sh("ls /root/own-*").await? == format!("/root/own-{n}"), "a sibling's file is visible");
        seen.push(copy.sh("cut -c1-64 /dev/shm/sums | head -1").await?);
    }
    seen.sort();
    seen.dedup();
    ensure!(seen.len() == all.len(), "two copies have the same random file");
    for copy in all {
        // Read-only by the kernel's emergency key, then checked from the device itself.
        copy.sh("sync; echo u > /proc/sysrq-trigger; sleep 0.3; echo 3 > /proc/sys/vm/drop_caches; e2fsck -fn /dev/vda")
            .await?;
    }
    Ok(())
}

pub async fn a_copy_is_a_new_individual(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    let snapshot = parent.snapshot().await?;
    let mut copies = parent.fork(3).await?;
    copies.push(Sandbox::restore(client, &snapshot).await?);
    copies.push(Sandbox::restore(client, &snapshot).await?);
    copies.push(parent.clone());
    let (mut drawn, mut names, mut generations) = (Vec::new(), Vec::new(), Vec::new());
    for copy in &copies {
        drawn.push(copy.sh("head -c 16 /dev/urandom | od -An -tx1").await?);
        names.push(copy.sh("hostname").await?);
        let generation = copy.view().await?.generation;
        ensure!(
            copy.sh("cat /run/keiki/generation").await? == generation.to_string(),
            "the guest knows another generation"
        );
        generations.push(generation.to_string());
        let drift = copy.sh("date +%s.%N").await?.parse::<f64>()? - now();
        ensure!(drift.abs() < 2.0, "its clock is {drift} s off");
    }
    for (what, mut values) in [("random bytes", drawn), ("host name", names), ("generation", generations)] {
        values.sort();
        values.dedup();
        ensure!(values.len() == copies.len(), "two copies have the same {what}");
    }
    Ok(())
}

fn now() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|since| since.as_secs_f64()).unwrap_or_default()
}
