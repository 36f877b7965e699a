//! Snapshots on real guests: persisted, loaded, refused, and a full disk.

mod guest;

use anyhow::{Context, Result, ensure};
use guest::{Guest, Lab, SHAPE, lab};
use keiki_engine::{
    Engine, EngineError, Machine, SharingScope,
    qemu::{Qemu, QemuConfig},
};
use std::{
    fs::{self, File},
    path::Path,
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
    fs::remove_dir_all(&origin.machine.resources().dir)?;
    // Three chained cycles; each time only the last snapshot is left.
    let mut dir = first;
    for cycle in 0..3 {
        let frozen = lab.engine.load(&dir, SharingScope::Node).await?;
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
            fs::remove_dir_all(&guest.machine.resources().dir)?;
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
    lab.engine.load(&good, SharingScope::Node).await?;
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
    type Damage<'a> = &'a dyn Fn(&Path) -> Result<()>;
    let damages: [(&str, Damage<'_>); 7] = [
        ("made by engine kvm", &|dir| edit(dir, &|v| v["made_by"]["engine"] = "kvm".into())),
        ("made by QEMU 1.0", &|dir| edit(dir, &|v| v["made_by"]["version"] = "1.0".into())),
        ("other devices", &|dir| edit(dir, &|v| v["made_by"]["machine"] = "00".into())),
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
        lab.engine.load(&dir, SharingScope::Node).await.with_context(|| format!("before: {clue}"))?;
        damage(&dir)?;
        match lab.engine.load(&dir, SharingScope::Node).await {
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
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: mounting a small filesystem needs root");
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

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_fails_the_freeze_and_nothing_else() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let Some(small) = SmallStore::new(&lab)? else { return Ok(()) };
    let at = |name: &str| -> Result<std::path::PathBuf> {
        let dir = small.0.path().join(name);
        fs::create_dir(&dir)?;
        Ok(dir)
    };
    let engine = Qemu::new(QemuConfig::new(small.0.path().join("store")));
    let run_dir = lab.fresh("run")?;
    let resources = keiki_engine::Resources { dir: at("machine")?, run_dir, netns: None };
    let disk = small.0.path().join("disk.raw");
    File::create(&disk)?.set_len(u64::from(SHAPE.disk_mib) << 20)?;
    let spec = keiki_engine::BootSpec { disk, ..lab.spec() };
    let machine = engine.boot(&spec, resources).await?;
    let mut guest = Guest::connect(machine).await?;
    let hash = guest.sh(FILL).await?;
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
