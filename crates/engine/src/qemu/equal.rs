//! Two thaws of one frozen machine are equal, byte for byte, until they run; and a frozen machine
//! is equal to the machine it was taken from, even where that machine returned memory.

#[path = "../../tests/guest/mod.rs"]
mod guest;

use super::{Qemu, QemuConfig, frozen::QemuFrozen, ram_copy::locate, waiting::WaitingVm};
use crate::{Frozen, layers::layer_path, prepared::Waiting};
use anyhow::{Context, Result, ensure};
use guest::{SHAPE, qemu_lab};
use keiki_snapshot::{Format, MEMORY_FILE};
use keiki_sys::{pages::read_memory, stopwatch::Stopwatch};
use serde_json::{Value, json};
use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

/// Digest of the guest's RAM as its monitor has it.
fn ram(dir: &Path, pid: u32) -> Result<String> {
    let mappings = locate(pid, &File::open(dir.join(MEMORY_FILE))?)?;
    let (mut hasher, mut buffer) = (blake3::Hasher::new(), vec![0; 1 << 20]);
    for mapping in mappings {
        let mut at = mapping.addresses.start;
        while at < mapping.addresses.end {
            let left = usize::try_from(mapping.addresses.end - at)?.min(buffer.len());
            let chunk = buffer.get_mut(..left).context("no chunk")?;
            read_memory(pid, at, chunk)?;
            hasher.update(chunk);
            at += left as u64;
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// The disk of a waiting VM as a block node for `qemu-img`.
fn chain(dir: &Path, vm: &WaitingVm) -> Value {
    let mut below = Value::Null;
    let top = (vm.record.top.clone(), Format::Qcow2);
    let layers = vm.record.layers.iter().map(|layer| (layer.name.clone(), layer.format));
    for (name, format) in layers.chain([top]) {
        let file = json!({"driver": "file", "filename": layer_path(dir, &name), "locking": "off"});
        below = match format {
            Format::Raw => json!({"driver": "raw", "file": file}),
            Format::Qcow2 => json!({"driver": "qcow2", "file": file, "backing": below}),
        };
    }
    below
}

fn same_disk(one: &str, two: &str) -> Result<()> {
    let output = Command::new("qemu-img").args(["compare", "-U", one, two]).output()?;
    ensure!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thaws_of_one_frozen_machine_are_equal_before_they_run() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    parent.sh("dd if=/dev/urandom of=/tmp/ram bs=1M count=32 2>/dev/null").await?;
    parent.sh("dd if=/tmp/ram of=/dev/vda bs=1M seek=3 count=8 conv=fsync 2>/dev/null").await?;
    // A second generation, so that there are private pages over a base, and more than one overlay.
    let (first, _) = lab.freeze(parent.machine.as_ref()).await?;
    parent.machine.stop().await?;
    let mut child = lab.thaw(first.as_ref()).await?;
    child.sh("dd if=/dev/urandom of=/tmp/more bs=1M count=8 2>/dev/null").await?;
    child.sh("dd if=/tmp/more of=/dev/vda bs=1M seek=7 count=8 conv=fsync 2>/dev/null").await?;
    let (frozen, _) = lab.freeze(child.machine.as_ref()).await?;
    let disk = child.sh("dd if=/dev/vda bs=1M count=16 2>/dev/null | sha256sum").await?;
    let manifest = frozen.persist().await?;
    let qemu = Qemu::new(QemuConfig::new(lab.dir.path().join("store")));
    let frozen = QemuFrozen::new(&qemu.host, &frozen.image().dir, manifest);

    let mut seen = Vec::new();
    for _ in 0..2 {
        let prepared = lab.engine.prepare(frozen.image(), lab.paths()?).await?;
        let (paths, mut vm) = prepared.take(frozen.image(), |waiting| match waiting {
            Waiting::Qemu(vm) => Ok(*vm),
            other => Err(other),
        })?;
        frozen.fill(&paths, &mut vm, &mut Stopwatch::start()).await?;
        let ram = ram(&paths.dir, vm.monitor.process().pid())?;
        seen.push((ram, format!("json:{}", chain(&paths.dir, &vm)), vm));
    }
    let image = lab_digest(&frozen.image().dir.join(MEMORY_FILE))?;
    for (ram, ..) in &seen {
        assert_eq!(*ram, image, "a thaw's memory is not the image's");
    }
    let [(_, one, ..), (_, two, ..)] = seen.as_slice() else { anyhow::bail!("two were made") };
    same_disk(one, two)?;
    // Equal, and of the instant: the first 16 MiB are what the guest had, by its own reading.
    let raw = lab.dir.path().join("disk.out");
    let made = Command::new("qemu-img").args(["convert", "-U", "-O", "raw", one]).arg(&raw).status()?;
    ensure!(made.success());
    let sum = Command::new("sh")
        .arg("-c")
        .arg(format!("head -c 16777216 {} | sha256sum", raw.display()))
        .output()?;
    assert_eq!(String::from_utf8_lossy(&sum.stdout).trim(), disk.trim());
    for (_, _, vm) in seen {
        vm.end().await?;
    }
    child.machine.stop().await?;
    assert_eq!(SHAPE, frozen.image().shape);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_a_guest_freed_goes_back_and_is_zero_ever_after() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let mut parent = lab.boot().await?;
    // So that the image holds something where the child will have nothing.
    parent.sh("dd if=/dev/urandom of=/tmp/old bs=1M count=32 2>/dev/null").await?;
    let (first, _) = lab.freeze(parent.machine.as_ref()).await?;
    parent.machine.stop().await?;
    let base = first.image().dir.join(MEMORY_FILE);
    let before = lab_digest(&base)?;

    let mut child = lab.thaw(first.as_ref()).await?;
    child.sh("dd if=/dev/urandom of=/tmp/keep bs=1M count=8 2>/dev/null").await?;
    child.sh("dd if=/dev/urandom of=/tmp/more bs=1M count=56 2>/dev/null").await?;
    let sum = child.sh("sha256sum /tmp/keep").await?;
    let grown = child.machine.memory().await?;
    ensure!(grown.private_bytes > 64 << 20, "{} private bytes after writing 64 MiB", grown.private_bytes);
    child.sh("rm /tmp/old /tmp/more").await?;
    let dir = child.machine.paths().dir.clone();
    let record: Value = serde_json::from_slice(&std::fs::read(dir.join("machine.json"))?)?;
    let pid = u32::try_from(record.get("pid").and_then(Value::as_u64).context("no pid")?)?;
    let begun = Instant::now();
    let freed = loop {
        let now = child.machine.memory().await?;
        let over = zeroed(&dir, pid)?;
        // Not all of it: Linux reports blocks of 2 MiB that are free as a whole.
        if now.private_bytes + (36 << 20) < grown.private_bytes && over > 8 << 20 {
            ensure!(now.rss_bytes + (36 << 20) < grown.rss_bytes, "{grown:?} became {now:?}");
            break begun.elapsed();
        }
        let seconds = begun.elapsed().as_secs();
        ensure!(
            seconds < 30,
            "after {seconds} s: {grown:?} became {now:?}, {over} bytes of the image are zero memory"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    eprintln!("given back after {freed:?}");

    child.machine.pause().await?;
    let (frozen, _) = lab.freeze(child.machine.as_ref()).await?;
    let image = frozen.image().dir.join(MEMORY_FILE);
    assert_eq!(ram(&dir, pid)?, lab_digest(&image)?, "the image is not what the machine has");
    child.machine.resume().await?;

    let mut grandchild = lab.thaw(frozen.as_ref()).await?;
    for guest in [&mut child, &mut grandchild] {
        assert_eq!(guest.sh("sha256sum /tmp/keep").await?, sum);
        // What was given back can be had again.
        guest.sh("dd if=/dev/zero of=/tmp/again bs=1M count=56 2>/dev/null && cmp -n 58720256 /tmp/again /dev/zero").await?;
    }
    assert_eq!(lab_digest(&base)?, before, "the base has changed");
    child.machine.stop().await?;
    Ok(grandchild.machine.stop().await?)
}

/// Bytes that are not zero in the image where the machine has zero memory, by whole MiB.
fn zeroed(dir: &Path, pid: u32) -> Result<u64> {
    const STEP: u64 = 1 << 20;
    let image = File::open(dir.join(MEMORY_FILE))?;
    let (mut buffer, mut total) = (vec![0; 1 << 20], 0);
    for mapping in locate(pid, &image)?.into_iter().filter(|mapping| mapping.zero) {
        let len = mapping.addresses.end - mapping.addresses.start;
        for step in 0..len / STEP {
            image.read_exact_at(&mut buffer, mapping.offset + step * STEP)?;
            total += if buffer.iter().any(|byte| *byte != 0) { STEP } else { 0 };
        }
    }
    Ok(total)
}

fn lab_digest(path: &Path) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    std::io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(hasher.finalize().to_hex().to_string())
}
