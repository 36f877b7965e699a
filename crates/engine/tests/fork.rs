//! Freeze and thaw on real guests.

mod guest;

use anyhow::Result;
use guest::{Guest, SHAPE, lab};
use keiki_types::Sharing;
use std::time::{Duration, Instant};

/// RAM that the guest hashes: a file in tmpfs.
const FILL: &str = "dd if=/dev/urandom of=/tmp/ram bs=1M count=16 2>/dev/null";
const HASH: &str = "sha256sum < /tmp/ram";

fn number(text: &str) -> Result<u64> {
    Ok(text.trim().parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_goes_on_where_its_parent_stood() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    parent.sh(FILL).await?;
    let hash = parent.sh(HASH).await?;
    parent.sh("echo base | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null").await?;
    let before = number(&parent.sh("cat /tmp/n").await?)?;
    let (frozen, report) = lab.freeze(parent.machine.as_ref()).await?;
    eprintln!("freeze: {report:?}");
    let (mut one, steps, took) = lab.thaw_timed(frozen.as_ref()).await?;
    eprintln!("prepare: {took:?} thaw: {steps:?}");
    let mut two = lab.thaw(frozen.as_ref()).await?;
    for guest in [&mut parent, &mut one, &mut two] {
        assert_eq!(guest.sh(HASH).await?, hash);
        let now = number(&guest.sh("cat /tmp/n").await?)?;
        assert!(now >= before, "{now} < {before}");
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert!(number(&guest.sh("cat /tmp/n").await?)? > now, "the counter stands still");
        assert_eq!(guest.sh("dd if=/dev/vda bs=4096 skip=1 count=1 2>/dev/null | head -c 4").await?, "base");
    }
    for guest in [&one, &two, &parent] {
        eprintln!("{:?}", guest.machine.memory().await?);
        let started = std::time::Instant::now();
        guest.machine.stop().await?;
        eprintln!("stop: {:?}", started.elapsed());
        assert_eq!(std::fs::read_dir(&guest.machine.paths().run_dir)?.count(), 0);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_diverge_in_ram_and_on_disk() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    parent.sh(FILL).await?;
    parent.sh("echo base | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null").await?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let mut one = lab.thaw(frozen.as_ref()).await?;
    let mut two = lab.thaw(frozen.as_ref()).await?;
    let mut hashes = Vec::new();
    for (name, guest) in [("parent", &mut parent), ("one", &mut one), ("two", &mut two)] {
        guest.sh(&format!("{FILL}; echo {name} > /tmp/name")).await?;
        let write = format!("echo {name} | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null");
        guest.sh(&format!("{write}; dd if=/tmp/ram of=/dev/vda bs=1M seek=4 conv=fsync 2>/dev/null")).await?;
        hashes.push((name, guest.sh(HASH).await?));
    }
    for ((name, hash), guest) in hashes.iter().zip([&mut parent, &mut one, &mut two]) {
        guest.sh("echo 3 > /proc/sys/vm/drop_caches").await?;
        assert_eq!(&guest.sh(HASH).await?, hash);
        assert_eq!(&guest.sh("cat /tmp/name").await?, name);
        let read = guest.sh("dd if=/dev/vda bs=4096 skip=1 count=1 2>/dev/null | head -n 1").await?;
        assert_eq!(&read, name);
        let disk = guest.sh("dd if=/dev/vda bs=1M skip=4 count=16 2>/dev/null | sha256sum").await?;
        assert_eq!(&disk, hash);
    }
    // The frozen machine has seen nothing of it.
    let mut three = lab.thaw(frozen.as_ref()).await?;
    assert_eq!(three.sh("dd if=/dev/vda bs=4096 skip=1 count=1 2>/dev/null | head -n 1").await?, "base");
    assert_eq!(three.sh("cat /tmp/name 2>/dev/null").await?, "");
    for guest in [parent, one, two, three] {
        guest.machine.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_of_a_fork_outlives_both_and_the_directories() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    parent
        .sh("echo 1 > /tmp/line; echo first | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null")
        .await?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let mut child = lab.thaw(frozen.as_ref()).await?;
    std::fs::remove_dir_all(&frozen.image().dir)?;
    child
        .sh("echo 2 >> /tmp/line; echo second | dd of=/dev/vda bs=4096 seek=2 conv=fsync 2>/dev/null")
        .await?;
    let (again, report) = lab.freeze(child.machine.as_ref()).await?;
    eprintln!("freeze of a child: {report:?}");
    let mut grandchild = lab.thaw(again.as_ref()).await?;
    std::fs::remove_dir_all(&again.image().dir)?;
    for guest in [parent, child] {
        guest.machine.stop().await?;
        std::fs::remove_dir_all(&guest.machine.paths().dir)?;
    }
    assert_eq!(grandchild.sh("cat /tmp/line").await?, "1\n2");
    let read = grandchild
        .sh("for s in 1 2; do dd if=/dev/vda bs=4096 skip=$s count=1 2>/dev/null | head -n 1; done");
    assert_eq!(read.await?, "first\nsecond");
    let (third, _) = lab.freeze(grandchild.machine.as_ref()).await?;
    let mut last = lab.thaw(third.as_ref()).await?;
    assert_eq!(last.sh("cat /tmp/line").await?, "1\n2");
    grandchild.machine.stop().await?;
    last.machine.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_may_be_prepared_before_the_freeze() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    parent.sh(FILL).await?;
    let hash = parent.sh(HASH).await?;
    let image = lab.engine.image(&lab.fresh("f")?, SHAPE).await?;
    let prepared = lab.engine.prepare(&image, lab.paths()?).await?;
    let (spare, spare_paths) = (lab.paths()?, lab.paths()?);
    let cancelled = lab.engine.prepare(&image, spare.clone()).await?;
    let dropped = lab.engine.prepare(&image, spare_paths.clone()).await?;
    assert!(prepared.is_alive());
    let (frozen, _) = parent.machine.freeze(image).await?;
    let started = Instant::now();
    let (machine, steps) = frozen.thaw(prepared).await?;
    eprintln!("thaw into a prepared VM: {:?} {steps:?}", started.elapsed());
    let mut child = Guest::connect(machine).await?;
    assert_eq!(child.sh(HASH).await?, hash);
    cancelled.cancel().await;
    drop(dropped);
    for paths in [spare, spare_paths] {
        assert_eq!(std::fs::read_dir(&paths.run_dir)?.count(), 0);
        assert_eq!(std::fs::read_dir(&paths.dir)?.count(), 1, "only the run directory is left");
    }
    // Paused stays paused across a freeze, and its copies run.
    parent.machine.pause().await?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let mut copy = lab.thaw(frozen.as_ref()).await?;
    assert_eq!(copy.sh(HASH).await?, hash);
    assert!(tokio::time::timeout(Duration::from_millis(500), parent.sh("echo")).await.is_err(), "it runs");
    parent.machine.resume().await?;
    parent.machine.stop().await?;
    child.machine.stop().await?;
    copy.machine.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn pause_with_64_mib_dirty() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let parent = lab.boot().await?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let mut child = lab.thaw(frozen.as_ref()).await?;
    parent.machine.stop().await?;
    let (_, idle) = lab.freeze(child.machine.as_ref()).await?;
    eprintln!("idle: {idle:?}");
    child.sh("dd if=/dev/urandom of=/tmp/big bs=1M count=64 2>/dev/null").await?;
    let (frozen, report) = lab.freeze(child.machine.as_ref()).await?;
    eprintln!("64 MiB: {report:?}");
    assert!(report.vcpu_pause < Duration::from_millis(120), "{report:?}");
    let hash = child.sh("sha256sum < /tmp/big").await?;
    let mut copy = lab.thaw(frozen.as_ref()).await?;
    assert_eq!(copy.sh("sha256sum < /tmp/big").await?, hash);
    tokio::time::sleep(Duration::from_secs(1)).await;
    eprintln!("idle child: {:?}", copy.machine.memory().await?);
    child.machine.stop().await?;
    copy.machine.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn long_chains_become_short_and_stay_right() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut guest = lab.boot().await?;
    let layers = |guest: &Guest| -> Result<usize> {
        Ok(std::fs::read_dir(guest.machine.paths().dir.join("layers"))?.count())
    };
    let check =
        "for s in $(seq 1 24); do dd if=/dev/vda bs=64k skip=$s count=1 2>/dev/null | head -n 1; done";
    let mut wanted = Vec::new();
    for generation in 1..=24 {
        let write =
            format!("echo g{generation} | dd of=/dev/vda bs=64k seek={generation} conv=fsync 2>/dev/null");
        guest.sh(&write).await?;
        wanted.push(format!("g{generation}"));
        let (frozen, report) = lab.freeze(guest.machine.as_ref()).await?;
        assert!(report.vcpu_pause < Duration::from_millis(500), "{report:?}");
        // Sometimes the child goes on, sometimes the parent.
        if generation % 3 == 0 {
            let child = lab.thaw(frozen.as_ref()).await?;
            guest.machine.stop().await?;
            guest = child;
        }
        std::fs::remove_dir_all(&frozen.image().dir)?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(layers(&guest)? < 16, "{} layers", layers(&guest)?);
    let (frozen, _) = lab.freeze(guest.machine.as_ref()).await?;
    frozen.persist().await?;
    guest.machine.stop().await?;
    let frozen = lab.engine.load(&frozen.image().dir, Sharing::Node).await?;
    let mut last = lab.thaw(frozen.as_ref()).await?;
    last.sh("echo 3 > /proc/sys/vm/drop_caches").await?;
    assert_eq!(last.sh(check).await?, wanted.join("\n"));
    last.machine.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_child_costs_little_memory() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    parent.sh(FILL).await?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let mut children = Vec::new();
    for _ in 0..8 {
        children.push(lab.thaw(frozen.as_ref()).await?);
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut sizes = Vec::new();
    for child in &children {
        let memory = child.machine.memory().await?;
        assert!(memory.private_bytes < 16 << 20, "{memory:?}");
        sizes.push(memory.pss_bytes >> 20);
    }
    eprintln!("PSS of eight idle children, MiB: {sizes:?}");
    for child in children {
        let started = Instant::now();
        child.machine.stop().await?;
        eprintln!("stop {:?}", started.elapsed());
    }
    sizes.sort_unstable();
    assert!(sizes.get(4).is_some_and(|median| *median <= 64), "{sizes:?}");
    parent.machine.stop().await?;
    Ok(())
}
