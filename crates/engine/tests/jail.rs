//! What a monitor has, and what it can reach.

mod guest;

use anyhow::{Context, Result, ensure};
use guest::{Guest, qemu_lab};
use keiki_engine::{
    Common, Engine, FIRST_USER, USERS,
    qemu::{Qemu, QemuConfig},
};
use keiki_testing::is_root;
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    time::{Duration, Instant},
};

fn pid(guest: &Guest) -> Result<u32> {
    let record = fs::read(guest.machine.paths().dir.join("machine.json"))?;
    let record: serde_json::Value = serde_json::from_slice(&record)?;
    Ok(u32::try_from(record["pid"].as_u64().context("no pid")?)?)
}

fn proc(pid: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{name}"))
}

fn field(pid: u32, name: &str) -> Result<String> {
    let status = fs::read_to_string(proc(pid, "status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).context("no such field")?;
    Ok(line.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Device and inode of every regular file that the process holds open for writing.
fn writable(pid: u32) -> Result<BTreeSet<(u64, u64)>> {
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(proc(pid, "fd"))? {
        let entry = entry?;
        let Ok(meta) = fs::metadata(entry.path()) else { continue };
        let info = fs::read_to_string(proc(pid, "fdinfo").join(entry.file_name()))?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).context("no flags")?;
        if meta.is_file() && u32::from_str_radix(flags.trim(), 8)? & 3 != 0 {
            files.insert((meta.dev(), meta.ino()));
        }
    }
    Ok(files)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_monitor_has_nothing_but_its_machine() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    if !is_root() {
        return Ok(());
    }
    let parent = lab.boot().await?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let child = lab.thaw(frozen.as_ref()).await?;
    let mut users = BTreeSet::new();
    for guest in [&parent, &child] {
        let pid = pid(guest)?;
        let user: u32 = field(pid, "Uid:")?.split(' ').next().context("no user")?.parse()?;
        ensure!((FIRST_USER..FIRST_USER + USERS).contains(&user), "{user}");
        users.insert(user);
        assert_eq!(field(pid, "Uid:")?, format!("{user} {user} {user} {user}"));
        assert_eq!(field(pid, "Gid:")?, format!("{user} {user} {user} {user}"));
        assert_eq!(field(pid, "Groups:")?, "");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(pid, set)?, "0000000000000000", "{set}");
        }
        assert_eq!(field(pid, "NoNewPrivs:")?, "1");
        assert_eq!(field(pid, "Seccomp:")?, "2");
        assert_eq!(fs::read_to_string(proc(pid, "oom_score_adj"))?.trim(), "500");
        let known = ["bin", "etc", "initrd", "kernel", "lib", "lib64", "m", "ram.so", "sbin", "usr"];
        for entry in fs::read_dir(proc(pid, "root"))? {
            let name = entry?.file_name();
            ensure!(known.iter().any(|known| name == *known), "{name:?} of the host is in reach");
        }
        // Whatever is reachable and not the host's system is the machine's directory.
        let mine = fs::metadata(&guest.machine.paths().dir)?;
        let there = fs::metadata(proc(pid, "root/m"))?;
        assert_eq!(
            (mine.dev(), mine.ino(), mine.uid(), mine.mode() & 0o777),
            (there.dev(), there.ino(), 0, 0o710)
        );
        let run = fs::metadata(&guest.machine.paths().run_dir)?;
        assert_eq!((run.uid(), run.mode() & 0o777), (0, 0o700));
    }
    assert_eq!(users.len(), 2, "siblings share a user");
    for guest in [parent, child] {
        guest.machine.stop().await?;
    }
    Ok(())
}

/// Invariant 1, by the kernel: whoever was taken over cannot change what others start from.
#[tokio::test(flavor = "multi_thread")]
async fn base_files_are_no_monitors_to_write() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    if !is_root() {
        return Ok(());
    }
    let mut parent = lab.boot().await?;
    parent.sh("echo one | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null").await?;
    // What the monitor could write before the freeze, it may keep a descriptor of.
    let before = writable(pid(&parent)?)?;
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    parent.sh("echo two | dd of=/dev/vda bs=4096 seek=1 conv=fsync 2>/dev/null").await?;
    let child = lab.thaw(frozen.as_ref()).await?;
    let dir = &frozen.image().dir;
    let mut base = vec![dir.join("vm.mem"), dir.join("vm.state")];
    for entry in fs::read_dir(dir.join("layers"))? {
        base.push(entry?.path());
    }
    assert_eq!(base.len(), 4);
    for guest in [&parent, &child] {
        let open = writable(pid(guest)?)?;
        assert_eq!(open.len(), 1, "a monitor writes its top and nothing else");
        for file in &base {
            let meta = fs::metadata(file)?;
            let id = (meta.dev(), meta.ino());
            assert_eq!((meta.uid(), meta.mode() & 0o022), (0, 0), "{}", file.display());
            ensure!(!open.contains(&id) && !before.contains(&id), "{} can be written", file.display());
        }
        // The names in its own directory are those files too.
        for entry in fs::read_dir(guest.machine.paths().dir.join("layers"))? {
            let meta = entry?.metadata()?;
            ensure!(meta.uid() == 0 || open.contains(&(meta.dev(), meta.ino())));
        }
    }
    assert_eq!(fs::metadata(dir)?.mode() & 0o077, 0, "others see frozen memory");
    for guest in [parent, child] {
        guest.machine.stop().await?;
    }
    Ok(())
}

/// How much later a monitor is there. Told, not judged: the host is shared.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_jail_costs() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    if !is_root() {
        return Ok(());
    }
    let config = |first_user| {
        let config = QemuConfig::new(lab.dir.path().join("store"));
        QemuConfig { common: Common { first_user, ..config.common }, ..config }
    };
    let (jailed, plain) = (Qemu::new(config(Some(FIRST_USER))), Qemu::new(config(None)));
    let image = jailed.image(&lab.fresh("f")?, guest::SHAPE).await?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..15 {
        for (engine, times) in [&jailed, &plain].into_iter().zip(&mut times) {
            let started = Instant::now();
            let prepared = engine.prepare(&image, lab.paths()?).await?;
            times.push(started.elapsed());
            prepared.cancel().await;
        }
    }
    let [jailed, plain] = times.map(|mut times| {
        times.sort();
        times.get(times.len() / 2).copied().unwrap_or(Duration::ZERO)
    });
    eprintln!("a prepared VM, median of 15: jailed {jailed:?}, not jailed {plain:?}");
    Ok(())
}
