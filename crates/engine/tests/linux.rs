//! What a whole Linux makes of being copied: all its processors go on, memory above 4 GiB is carried, it knows that it is a
//! copy. With engine `kvm`.

mod guest;

use anyhow::{Context, Result, ensure};
use guest::{Guest, Lab, kvm_lab};
use keiki_engine::{BootSpec, Frozen};
use keiki_types::Shape;
use keiki_types::Sharing;
use std::time::{Duration, Instant};

async fn boot(lab: &Lab, shape: Shape) -> Result<Guest> {
    let spec = BootSpec { shape, ..lab.spec() };
    Guest::connect(lab.engine.boot(&spec, lab.paths()?).await?).await
}

/// A copy through files.
async fn stored(lab: &Lab, frozen: &dyn Frozen) -> Result<Guest> {
    frozen.persist().await?;
    let loaded = lab.engine.load(&frozen.image().dir, Sharing::Node).await?;
    lab.thaw(loaded.as_ref()).await
}

async fn stop(lab: &Lab, guests: Vec<Guest>) -> Result<()> {
    for guest in guests {
        guest.machine.stop().await?;
    }
    lab.engine.close().await;
    Ok(())
}

/// After which a processor that does not count is said not to.
const STALLED: Duration = Duration::from_secs(20);

/// On each processor one counts.
fn counters(vcpus: u8) -> String {
    let all = processors(vcpus);
    format!(
        "for c in {all}; do taskset $((1 << c)) \
         sh -c 'n=0; while :; do n=$((n+1)); echo $n >/tmp/c'$c'; usleep 20000; done' & done"
    )
}

fn processors(vcpus: u8) -> String {
    (0..vcpus).map(|c| c.to_string()).collect::<Vec<_>>().join(" ")
}

async fn counts(guest: &mut Guest, vcpus: u8) -> Result<Vec<u64>> {
    let all = processors(vcpus);
    // Written by truncating first: it may be empty.
    let line = format!(
        "for c in {all}; do until [ -s /tmp/c$c ] && n=$(cat /tmp/c$c) && [ -n \"$n\" ]; do :; done; echo $n; done"
    );
    let text = guest.sh(&line).await?;
    text.lines().map(|line| line.trim().parse().with_context(|| format!("{text:?}"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_processor_goes_on_in_every_copy() -> Result<()> {
    let Some(lab) = kvm_lab()? else { return Ok(()) };
    for vcpus in 2..=4 {
        let mut parent = boot(&lab, Shape { vcpus, ..guest::SHAPE }).await?;
        assert_eq!(parent.sh("grep -c ^processor /proc/cpuinfo").await?, vcpus.to_string());
        parent.sh(&counters(vcpus)).await?;
        counts(&mut parent, vcpus).await?;
        let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
        // One after the other: a machine of several processors is much for an emulated one.
        all_count_on("the original", parent, vcpus).await?;
        all_count_on("a fork", lab.thaw(frozen.as_ref()).await?, vcpus).await?;
        all_count_on("a restored one", stored(&lab, frozen.as_ref()).await?, vcpus).await?;
        lab.engine.close().await;
    }
    Ok(())
}

async fn all_count_on(who: &str, mut guest: Guest, vcpus: u8) -> Result<()> {
    let before = counts(&mut guest, vcpus).await?;
    let begun = Instant::now();
    loop {
        let after = counts(&mut guest, vcpus).await?;
        let Some(stands) = after.iter().zip(&before).position(|(now, before)| now <= before) else { break };
        ensure!(
            begun.elapsed() < STALLED,
            "{who} of {vcpus}: processor {stands} stands still: {before:?}, {after:?}"
        );
    }
    let bad = guest.sh("dmesg | grep -iwE 'stalls?|stalled|lockup|hung|unstable|BUG:' | head -n 5").await?;
    ensure!(bad.is_empty(), "{who} of {vcpus} complains: {bad}");
    guest.machine.stop().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_above_four_gib_is_carried() -> Result<()> {
    const HIGH: &str =
        "awk '/zone/ { high = $4 == \"Normal\" } high && /pages free/ { print $3 }' /proc/zoneinfo";
    const FILL: &str = "dd if=/dev/urandom of=/tmp/high bs=1M count=48 2>/dev/null";
    const HASH: &str = "sha256sum </tmp/high";
    let Some(lab) = kvm_lab()? else { return Ok(()) };
    let mut parent = boot(&lab, Shape { memory_mib: 5 << 10, ..guest::SHAPE }).await?;
    let free: u64 = parent.sh(HIGH).await?.trim().parse()?;
    parent.sh(FILL).await?;
    let left: u64 = parent.sh(HIGH).await?.trim().parse()?;
    // Linux takes memory that no old device can reach first, and that is what lies above 4 GiB.
    ensure!(free > left + (40 << 8), "of {free} pages above 4 GiB {left} are left: it lies below");
    let hash = parent.sh(HASH).await?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let mut forked = lab.thaw(frozen.as_ref()).await?;
    assert_eq!(forked.sh(HASH).await?, hash, "a fork");
    forked.sh(FILL).await?;
    assert_ne!(forked.sh(HASH).await?, hash);
    forked.machine.stop().await?;
    parent.machine.stop().await?;
    let mut restored = stored(&lab, frozen.as_ref()).await?;
    drop(frozen);
    assert_eq!(restored.sh(HASH).await?, hash, "a restored one");
    stop(&lab, vec![restored]).await
}

/// Linux sees the new generation ID, and stirs its entropy before anybody draws from it.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_knows_that_it_is_one() -> Result<()> {
    const NOTICED: &str = "dmesg | grep -c 'crng reseeded due to virtual machine fork'";
    let Some(lab) = kvm_lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    assert_eq!(parent.sh(NOTICED).await?, "0");
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let mut forked = lab.thaw(frozen.as_ref()).await?;
    assert_eq!(forked.sh(NOTICED).await?, "1", "a fork: {}", forked.sh("dmesg | tail -n 5").await?);
    let (second, _) = lab.freeze(forked.machine.as_ref()).await?;
    let mut grandchild = lab.thaw(second.as_ref()).await?;
    assert_eq!(grandchild.sh(NOTICED).await?, "2");
    let mut restored = stored(&lab, frozen.as_ref()).await?;
    assert_eq!(restored.sh(NOTICED).await?, "1", "a restored one");
    assert_eq!(parent.sh(NOTICED).await?, "0", "its original");
    stop(&lab, vec![parent, forked, grandchild, restored]).await
}
