//! Freeze and thaw on real guests.

mod guest;

use anyhow::Result;
use guest::lab;

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
    let (mut one, steps, seated) = lab.thaw_timed(frozen.as_ref()).await?;
    eprintln!("seat: {seated:?} thaw: {steps:?}");
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
        assert_eq!(std::fs::read_dir(&guest.machine.resources().run_dir)?.count(), 0);
    }
    Ok(())
}
