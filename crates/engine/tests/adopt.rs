//! Machines that outlive the engine that started them.

mod guest;

use anyhow::{Context, Result};
use guest::{Guest, Lab, lab, qemu_lab};
use keiki_engine::Engine;
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

fn another_engine(lab: &Lab) -> Result<Box<dyn Engine>> {
    guest::engine(lab.dir.path().join("store"))
}

/// Talks to a monitor that no engine is connected to.
fn qmp(run_dir: &Path, commands: &[(&str, Value)]) -> Result<()> {
    let mut stream = UnixStream::connect(run_dir.join("qmp.sock"))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    for (command, arguments) in [("qmp_capabilities", json!({}))].iter().chain(commands) {
        writeln!(stream, "{}", json!({"execute": command, "arguments": arguments}))?;
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let answer: Value = serde_json::from_str(&line)?;
            if answer.get("return").is_some() {
                break;
            }
            anyhow::ensure!(answer.get("error").is_none(), "{command}: {answer}");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_found_again_and_frozen() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let mut guest = lab.boot().await?;
    guest.sh("echo mine > /tmp/name").await?;
    let paths = guest.machine.paths().clone();
    drop(guest);
    let engine = another_engine(&lab)?;
    let machine = engine.adopt(&paths).await?.context("not found")?;
    let mut guest = Guest::connect(machine).await?;
    assert_eq!(guest.sh("cat /tmp/name").await?, "mine");
    let (frozen, _) = lab.freeze(guest.machine.as_ref()).await?;
    let mut child = lab.thaw(frozen.as_ref()).await?;
    let child_paths = child.machine.paths().clone();
    assert_eq!(child.sh("cat /tmp/name").await?, "mine");
    // Once more, and after both were paused by their user and the parent ended behind our back.
    child.machine.pause().await?;
    drop(child);
    let machine = engine.adopt(&child_paths).await?.context("child not found")?;
    machine.resume().await?;
    let mut child = Guest::connect(machine).await?;
    assert_eq!(child.sh("cat /tmp/name").await?, "mine");
    guest.sh("poweroff -f").await.ok();
    let how = tokio::time::timeout(Duration::from_secs(10), guest.machine.ended()).await?;
    assert!(how.contains("guest-shutdown") || how.contains("guest-reset"), "{how}");
    drop(guest);
    assert!(engine.adopt(&paths).await?.is_none());
    assert_eq!(fs::read_dir(&paths.run_dir)?.count(), 0);
    assert_eq!(fs::read_dir(&paths.dir)?.count(), 1, "only the run directory is left");
    assert_eq!(child.sh("cat /tmp/name").await?, "mine");
    child.machine.stop().await?;
    child.machine.stop().await?;
    assert!(engine.adopt(&child_paths).await?.is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recycled_number_is_not_taken_for_the_machine() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let guest = lab.boot().await?;
    let paths = guest.machine.paths().clone();
    let record = paths.dir.join("machine.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&record)?)?;
    guest.machine.stop().await?;
    let mut bystander = std::process::Command::new("sleep").arg("60").spawn()?;
    value["pid"] = bystander.id().into();
    fs::write(&record, value.to_string())?;
    assert!(another_engine(&lab)?.adopt(&paths).await?.is_none());
    assert!(bystander.try_wait()?.is_none(), "a stranger was killed");
    bystander.kill()?;
    bystander.wait()?;
    Ok(())
}

/// What a daemon that died inside a freeze leaves: parked vCPUs, a new top that is or is not in use.
#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_cut_short_is_mended() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let mut guest = lab.boot().await?;
    guest.sh("echo one | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null").await?;
    let paths = guest.machine.paths().clone();
    for switched in [false, true] {
        drop(guest);
        let record = paths.dir.join("machine.json");
        let mut value: Value = serde_json::from_slice(&fs::read(&record)?)?;
        let next = format!("{:032x}.qcow2", 7 + u32::from(switched));
        let node = format!("n{:028x}", 7 + u32::from(switched));
        let old = value["top_node"].as_str().context("no top")?.to_owned();
        value["next_top"] = next.clone().into();
        fs::write(&record, value.to_string())?;
        let path = paths.dir.join("layers").join(&next);
        fs::copy(lab.dir.path().join("store/empty-256.qcow2"), &path)?;
        // As the engine does: the monitor's own, and named as it sees it.
        let seen = match value["user"].as_u64() {
            Some(user) => {
                let user = u32::try_from(user)?;
                std::os::unix::fs::chown(&path, Some(user), Some(user))?;
                Path::new("/m/layers").join(&next)
            }
            None => path.clone(),
        };
        let add = json!({"driver": "qcow2", "node-name": node, "backing": null,
            "file": {"driver": "file", "filename": seen, "locking": "off"}});
        let mut commands = vec![("blockdev-add", add), ("stop", json!({}))];
        if switched {
            commands.push(("blockdev-snapshot", json!({"node": old, "overlay": node})));
        }
        qmp(&paths.run_dir, &commands)?;
        let machine = another_engine(&lab)?.adopt(&paths).await?.context("not found")?;
        guest = Guest::connect(machine).await?;
        assert_eq!(path.exists(), switched);
        let (frozen, _) = lab.freeze(guest.machine.as_ref()).await?;
        let mut child = lab.thaw(frozen.as_ref()).await?;
        let read = "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=4096 skip=1 count=1 2>/dev/null | head -n 1";
        assert_eq!(child.sh(read).await?, "one");
        assert_eq!(guest.sh(read).await?, "one");
        child.machine.stop().await?;
    }
    guest.machine.stop().await?;
    Ok(())
}

/// A prepared VM that no engine holds any more is ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_prepared_vm_is_ended() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let guest = lab.boot().await?;
    let image = lab.engine.image(&lab.fresh("f")?, guest::SHAPE).await?;
    let paths = lab.paths()?;
    let prepared = lab.engine.prepare(&image, paths.clone()).await?;
    std::mem::forget(prepared);
    assert!(another_engine(&lab)?.adopt(&paths).await.is_ok_and(|found| found.is_none()));
    assert_eq!(fs::read_dir(&paths.run_dir)?.count(), 0);
    guest.machine.stop().await?;
    Ok(())
}
