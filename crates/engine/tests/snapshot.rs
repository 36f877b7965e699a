//! Snapshots on real guests: persisted, loaded, refused, and a full disk.

mod guest;

use anyhow::{Context, Result, ensure};
use guest::{Guest, Lab, SHAPE, is_kvm, lab, qemu_lab};
use keiki_engine::{Engine, EngineError, Machine};
use keiki_types::Sharing;
use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::Command,
};

const FILL: &str = "dd if=/dev/urandom of=/tmp/ram bs=1M count=16 2>/dev/null; sha256sum < /tmp/ram";

async fn snapshot(lab: &Lab, machine: &dyn Machine) -> Result<std::path::PathBuf> {
    let (frozen, _) = lab.freeze(machine).await?;
    frozen.persist().await?;
    Ok(frozen.image().dir.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_all_that_a_restore_needs() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut origin = lab.boot().await?;
    let hash = origin.sh(FILL).await?;
    origin.sh("echo disk | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null").await?;
    let first = snapshot(&lab, origin.machine.as_ref()).await?;
    origin.machine.stop().await?;
    fs::remove_dir_all(&origin.machine.paths().dir)?;
    // Three chained cycles; each time only the last snapshot is left.
    let mut dir = first;
    for cycle in 0..3 {
        let frozen = lab.engine.load(&dir, Sharing::Node).await?;
        let mut guest = lab.thaw(frozen.as_ref()).await?;
        let mut twin = lab.thaw(frozen.as_ref()).await?;
        for guest in [&mut guest, &mut twin] {
            assert_eq!(guest.sh("sha256sum < /tmp/ram").await?, hash, "cycle {cycle}");
            let read = guest.sh("dd if=/dev/vda bs=4096 skip=1 count=1 2>/dev/null | head -n 1").await?;
            assert_eq!(read, "disk", "cycle {cycle}");
            assert_eq!(guest.sh("cat /tmp/cycles 2>/dev/null | wc -l").await?, cycle.to_string());
        }
        guest.sh("echo >> /tmp/cycles").await?;
        let next = snapshot(&lab, guest.machine.as_ref()).await?;
        for guest in [guest, twin] {
            guest.machine.stop().await?;
            fs::remove_dir_all(&guest.machine.paths().dir)?;
        }
        fs::remove_dir_all(&dir)?;
        dir = next;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_that_do_not_fit_are_refused() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let guest = lab.boot().await?;
    let good = snapshot(&lab, guest.machine.as_ref()).await?;
    guest.machine.stop().await?;
    lab.engine.load(&good, Sharing::Node).await?;
    let manifest = |v: &serde_json::Value| serde_json::to_vec(v);
    let edit = |dir: &Path, change: &dyn Fn(&mut serde_json::Value)| -> Result<()> {
        let path = dir.join("manifest.json");
        let mut value = serde_json::from_slice(&fs::read(&path)?)?;
        change(&mut value);
        Ok(fs::write(path, manifest(&value)?)?)
    };
    let layer = |dir: &Path, index: usize| -> Result<std::path::PathBuf> {
        let value: serde_json::Value = serde_json::from_slice(&fs::read(dir.join("manifest.json"))?)?;
        let name = value.pointer(&format!("/layers/{index}/name")).and_then(|name| name.as_str());
        Ok(dir.join("layers").join(name.context("no such layer")?))
    };
    let (other, made_by, version) = match is_kvm() {
        true => ("qemu", "made by engine qemu", "made by kvm 1.0"),
        false => ("kvm", "made by engine kvm", "made by qemu 1.0"),
    };
    type Damage<'a> = &'a dyn Fn(&Path) -> Result<()>;
    let damages: [(&str, Damage<'_>); 7] = [
        (made_by, &|dir| edit(dir, &|v| v["made_by"]["engine"] = other.into())),
        (version, &|dir| edit(dir, &|v| v["made_by"]["version"] = "1.0".into())),
        ("different devices", &|dir| edit(dir, &|v| v["made_by"]["machine"] = "00".into())),
        ("vm.state is damaged", &|dir| flip(&dir.join("vm.state"), 100)),
        ("names a backing file", &|dir| {
            flip(&layer(dir, 1)?, 15)?;
            flip(&layer(dir, 1)?, 19)
        }),
        ("not qcow2", &|dir| flip(&layer(dir, 1)?, 0)),
        ("is missing", &|dir| Ok(fs::remove_file(dir.join("manifest.json"))?)),
    ];
    for (clue, damage) in damages {
        let dir = lab.fresh("damaged")?;
        let copied =
            Command::new("cp").args(["-a", "--reflink=always"]).arg(good.join(".")).arg(&dir).status()?;
        ensure!(copied.success());
        lab.engine.load(&dir, Sharing::Node).await.with_context(|| format!("before: {clue}"))?;
        damage(&dir)?;
        match lab.engine.load(&dir, Sharing::Node).await {
            Err(EngineError::Refused { why, .. }) if why.contains(clue) => {}
            Err(other) => anyhow::bail!("wanted {clue:?}, got {other}"),
            Ok(_) => anyhow::bail!("wanted {clue:?}, it was loaded"),
        }
    }
    Ok(())
}

fn flip(path: &Path, at: usize) -> Result<()> {
    let mut bytes = fs::read(path)?;
    *bytes.get_mut(at).context("too short")? ^= 1;
    Ok(fs::write(path, bytes)?)
}

/// A small filesystem, unmounted at the end.
struct SmallStore(tempfile::TempDir);

impl SmallStore {
    /// None where this process may not mount.
    fn new(lab: &Lab) -> Result<Option<Self>> {
        if !keiki_testing::is_root() {
            return Ok(None);
        }
        let image = lab.dir.path().join("small.img");
        File::create(&image)?.set_len(320 << 20)?;
        let point = tempfile::Builder::new().prefix("keiki-small-").tempdir()?;
        let made = Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image).status()?;
        ensure!(made.success(), "mkfs.xfs failed");
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&image).arg(point.path()).status()?;
        ensure!(mounted.success(), "mount failed");
        Ok(Some(Self(point)))
    }

    fn dir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.0.path().join(name);
        fs::create_dir(&dir)?;
        Ok(dir)
    }
}

/// A guest whose files are on a small filesystem, with 16 MiB of noise in its RAM, and their hash.
async fn boot_on(lab: &Lab, small: &SmallStore) -> Result<(Box<dyn Engine>, Guest, String)> {
    let engine = guest::engine(small.0.path().join("store"))?;
    let run_dir = lab.fresh("run")?;
    let paths = keiki_engine::VmPaths { dir: small.dir("machine")?, run_dir, netns: None };
    let disk = small.0.path().join("disk.raw");
    File::create(&disk)?.set_len(u64::from(SHAPE.disk_mib) << 20)?;
    let spec = keiki_engine::BootSpec { disk, ..lab.spec() };
    let machine = engine.boot(&spec, paths).await?;
    let mut guest = Guest::connect(machine).await?;
    let hash = guest.sh(FILL).await?;
    Ok((engine, guest, hash))
}

impl Drop for SmallStore {
    fn drop(&mut self) {
        guest::end_machines(self.0.path());
        let unmounted = Command::new("umount").arg(self.0.path()).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("{} stays mounted", self.0.path().display());
        }
    }
}

/// Where a freeze writes memory; with `kvm` it stays in a process, and is written by a persist.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_fails_the_freeze_and_nothing_else() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let Some(small) = SmallStore::new(&lab)? else { return Ok(()) };
    let (engine, mut guest, hash) = boot_on(&lab, &small).await?;
    let at = |name: &str| small.dir(name);
    let filler = small.0.path().join("filler");
    let free = rustix::fs::statvfs(small.0.path())?;
    // Less than the guest's RAM needs, more than the small files need.
    let keep = 20 << 20;
    let fill = File::create(&filler)?;
    rustix::fs::fallocate(
        &fill,
        rustix::fs::FallocateFlags::empty(),
        0,
        free.f_bavail * free.f_frsize - keep,
    )?;
    for round in 0..2 {
        let image = engine.image(&at(&format!("frozen-{round}"))?, SHAPE).await?;
        let dir = image.dir.clone();
        match guest.machine.freeze(image).await {
            Err(EngineError::NoSpace(_)) => {}
            Err(other) => anyhow::bail!("wanted NoSpace, got {other:?}"),
            Ok(_) => anyhow::bail!("it fit"),
        }
        assert_eq!(fs::read_dir(&dir)?.count(), 0, "something is left of the failed freeze");
        assert_eq!(guest.sh("sha256sum < /tmp/ram").await?, hash);
        guest.sh("echo on | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null").await?;
    }
    drop(fill);
    fs::remove_file(&filler)?;
    let image = engine.image(&at("frozen")?, SHAPE).await?;
    guest.machine.freeze(image).await?;
    guest.machine.stop().await?;
    Ok(())
}

/// Whose memory may not be shared has a file of its own: of other pages in memory, not of other blocks on disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_shares_with_nobody_has_its_own_memory_file() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let mut guest = lab.boot().await?;
    guest.sh("echo mine > /tmp/name").await?;
    let (frozen, _) = lab.freeze(guest.machine.as_ref()).await?;
    frozen.persist().await?;
    guest.machine.stop().await?;
    let dir = frozen.image().dir.clone();
    let inode = |dir: &std::path::Path| -> Result<u64> {
        Ok(std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(dir.join("vm.mem"))?))
    };
    for (scope, shared) in [(Sharing::Node, true), (Sharing::None, false)] {
        let frozen = lab.engine.load(&dir, scope).await?;
        let mut copy = lab.thaw(frozen.as_ref()).await?;
        assert_eq!(copy.sh("cat /tmp/name").await?, "mine");
        assert_eq!(inode(&copy.machine.paths().dir)? == inode(&dir)?, shared);
        copy.machine.stop().await?;
    }
    Ok(())
}

/// The disk fills up between the freeze and the persist: refused, without a manifest, and possible later.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_fails_the_persist_and_leaves_no_manifest() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let Some(small) = SmallStore::new(&lab)? else { return Ok(()) };
    let (engine, mut guest, hash) = boot_on(&lab, &small).await?;
    let image = engine.image(&small.dir("frozen")?, SHAPE).await?;
    let dir = image.dir.clone();
    let (frozen, _) = guest.machine.freeze(image).await?;
    let filler = small.0.path().join("filler");
    let mut fill = File::create(&filler)?;
    let free = rustix::fs::statvfs(small.0.path())?;
    let most = free.f_bavail * free.f_frsize / 10 * 9;
    rustix::fs::fallocate(&fill, rustix::fs::FallocateFlags::empty(), 0, most)?;
    // To the last block.
    fill.seek(SeekFrom::End(0))?;
    while fill.write_all(&[7; 4096]).and_then(|()| fill.sync_data()).is_ok() {}
    match frozen.persist().await {
        Err(EngineError::NoSpace(_)) => {}
        other => anyhow::bail!("wanted NoSpace, got {other:?}"),
    }
    let left = |name: &str| dir.join(name).exists();
    ensure!(!left("manifest.json") && !left(".manifest.new"), "half a manifest is there");
    ensure!(engine.load(&dir, Sharing::Node).await.is_err(), "a snapshot without a manifest was loaded");
    ensure!(guest.sh("sha256sum < /tmp/ram").await? == hash, "the machine did not go on");
    drop(fill);
    fs::remove_file(&filler)?;
    frozen.persist().await?;
    engine.load(&dir, Sharing::Node).await?;
    guest.machine.stop().await?;
    engine.close().await;
    Ok(())
}
