//! The engine on `keiki-vmm`, with a guest of a few bytes: wherever `/dev/kvm` opens, also where it is too slow for
//! Linux. `KEIKI_TEST_VMM` names the monitor, `KEIKI_TEST_STORE` a directory on a file system with reflinks.

use anyhow::{Context, Result, ensure};
use keiki_engine::{
    BootSpec, Common, Engine, EngineError, FIRST_USER, Frozen, Machine, USERS, VmPaths,
    kvm::{Kvm, KvmConfig},
};
use keiki_sys::process::Process;
use keiki_testing::{is_root, skip};
use keiki_types::{Shape, Sharing};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;

const SHAPE: Shape = Shape { vcpus: 1, memory_mib: 64, disk_mib: 16 };
const PATIENCE: Duration = Duration::from_secs(60);
type Held = Arc<dyn Frozen>;

/// Counts in its memory and writes each count to the serial port, as eight letters A to P and a line's end.
#[rustfmt::skip]
const GUEST: &[u8] = &[
    0xff, 0x05, 0x00, 0x00, 0x20, 0x00, // again: inc dword [0x200000]
    0x8b, 0x1d, 0x00, 0x00, 0x20, 0x00, // mov ebx, [0x200000]
    0xb9, 0x08, 0x00, 0x00, 0x00,       // mov ecx, 8
    0xba, 0xf8, 0x03, 0x00, 0x00,       // mov edx, 0x3f8
    0xc1, 0xc3, 0x04,                   // digit: rol ebx, 4
    0x88, 0xd8,                         // mov al, bl
    0x24, 0x0f,                         // and al, 15
    0x04, 0x41,                         // add al, 'A'
    0xee,                               // out dx, al
    0x49,                               // dec ecx
    0x75, 0xf3,                         // jnz digit
    0xb0, 0x0a,                         // mov al, 10
    0xee,                               // out dx, al
    0xb9, 0x20, 0x4e, 0x00, 0x00,       // mov ecx, 20000
    0x49,                               // wait: dec ecx
    0x75, 0xfd,                         // jnz wait
    0xeb, 0xd0,                         // jmp again
];

/// The guest as an ELF kernel with an entry for PVH, which is 32-bit protected mode.
fn kernel() -> Vec<u8> {
    const AT: u64 = 0x100_0000;
    let segment = |kind: u32, offset: u64, address: u64, len: u64, alignment: u64| {
        let words = [offset, address, address, len, len, alignment];
        [&kind.to_le_bytes()[..], &7_u32.to_le_bytes(), &words.map(u64::to_le_bytes).concat()].concat()
    };
    let note = [4_u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), AT as u32].map(u32::to_le_bytes).concat();
    let mut image = b"\x7fELF\x02\x01\x01".to_vec();
    image.resize(16, 0);
    image.extend([2_u16, 62].map(u16::to_le_bytes).concat());
    image.extend(1_u32.to_le_bytes());
    image.extend([AT, 64, 0].map(u64::to_le_bytes).concat());
    image.extend(0_u32.to_le_bytes());
    image.extend([64_u16, 56, 2, 0, 0, 0].map(u16::to_le_bytes).concat());
    image.extend(segment(1, 512, AT, GUEST.len() as u64, 4096));
    image.extend(segment(4, 256, 0, note.len() as u64, 4));
    image.resize(256, 0);
    image.extend(note);
    image.resize(512, 0);
    image.extend(GUEST);
    image
}

struct Lab {
    engine: Kvm,
    dir: TempDir,
    count: AtomicU32,
}

/// None, with a message, where there is nothing to test with.
fn lab() -> Result<Option<Lab>> {
    let Some(vmm) = std::env::var_os("KEIKI_TEST_VMM") else {
        skip("guest", "KEIKI_TEST_VMM does not say where keiki-vmm is");
        return Ok(None);
    };
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        skip("kvm", format!("/dev/kvm does not open ({error})"));
        return Ok(None);
    }
    let store = std::env::var_os("KEIKI_TEST_STORE").map_or_else(std::env::temp_dir, PathBuf::from);
    // Short: a socket's path has at most 107 bytes.
    let dir = tempfile::Builder::new().prefix("kvm-").tempdir_in(store)?;
    fs::write(dir.path().join("kernel"), kernel())?;
    fs::write(dir.path().join("initrd"), b"none")?;
    File::create(dir.path().join("disk.raw"))?.set_len(u64::from(SHAPE.disk_mib) << 20)?;
    let engine = Kvm::new(config(vmm.into(), &dir));
    Ok(Some(Lab { engine, dir, count: AtomicU32::new(0) }))
}

fn config(binary: PathBuf, dir: &TempDir) -> KvmConfig {
    KvmConfig { binary, forced: true, common: Common::new(dir.path().join("store")) }
}

impl Lab {
    fn fresh(&self, name: &str) -> Result<PathBuf> {
        let dir = self.dir.path().join(format!("{name}{}", self.count.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&dir)?;
        Ok(dir)
    }

    fn paths(&self) -> Result<VmPaths> {
        let dir = self.fresh("m")?;
        let run_dir = dir.join("run");
        fs::create_dir(&run_dir)?;
        Ok(VmPaths { dir, run_dir, netns: None })
    }

    async fn boot(&self) -> Result<Box<dyn Machine>> {
        let at = |name| self.dir.path().join(name);
        let spec = BootSpec {
            shape: SHAPE,
            kernel: at("kernel"),
            initrd: at("initrd"),
            disk: at("disk.raw"),
            cmdline: String::new(),
        };
        Ok(self.engine.boot(&spec, self.paths()?).await?)
    }

    async fn freeze(&self, machine: &dyn Machine) -> Result<Held> {
        let image = self.engine.image(&self.fresh("f")?, SHAPE).await?;
        Ok(machine.freeze(image).await?.0)
    }

    async fn thaw(&self, frozen: &dyn Frozen) -> Result<Box<dyn Machine>> {
        let prepared = self.engine.prepare(frozen.image(), self.paths()?).await?;
        Ok(frozen.thaw(prepared).await?.0)
    }

    /// Thaws, and kills the zygote when it was picked and cannot have made a machine. It is the only process but these.
    async fn thaw_without_zygote(
        &self,
        frozen: &Held,
        others: &[u32],
    ) -> Result<(keiki_engine::Result<Box<dyn Machine>>, VmPaths)> {
        let zygotes = self.processes()?.into_iter().filter(|pid| !others.contains(pid));
        let [zygote] = zygotes.collect::<Vec<_>>()[..] else { anyhow::bail!("not one zygote") };
        let zygote = Process::open(zygote)?.context("gone")?;
        let pid = rustix::process::Pid::from_raw(zygote.pid().try_into()?).context("none")?;
        rustix::process::kill_process(pid, rustix::process::Signal::STOP)?;
        let paths = self.paths()?;
        let prepared = self.engine.prepare(frozen.image(), paths.clone()).await?;
        let held = Arc::clone(frozen);
        let thaw = tokio::spawn(async move { held.thaw(prepared).await });
        // The memory under the machine is linked once the zygote is picked.
        let begun = Instant::now();
        while !paths.dir.join("vm.mem").exists() {
            ensure!(begun.elapsed() < PATIENCE, "no zygote is picked");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        zygote.kill()?;
        Ok((thaw.await?.map(|(machine, _)| machine), paths))
    }

    /// The engine of a later process of the node.
    fn another(&self) -> Result<Kvm> {
        let vmm = std::env::var_os("KEIKI_TEST_VMM").context("unset meanwhile")?;
        Ok(Kvm::new(config(vmm.into(), &self.dir)))
    }

    /// Processes that have something of this test open or mapped.
    fn processes(&self) -> Result<BTreeSet<u32>> {
        let mark = self.dir.path().to_string_lossy().into_owned();
        let mut found = BTreeSet::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let proc = PathBuf::from(format!("/proc/{pid}"));
            if fs::read_to_string(proc.join("comm")).is_ok_and(|name| name.trim() == "keiki-vmm") {
                let line = fs::read(proc.join("cmdline")).unwrap_or_default();
                if String::from_utf8_lossy(&line).contains(&mark) {
                    found.insert(pid);
                }
            }
        }
        Ok(found)
    }

    async fn all_gone(&self) -> Result<()> {
        let begun = Instant::now();
        while !self.processes()?.is_empty() {
            ensure!(begun.elapsed() < PATIENCE, "still there: {:?}", self.processes()?);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for pid in self.processes().unwrap_or_default() {
            if let Ok(Some(process)) = Process::open(pid) {
                let _ = process.kill();
            }
        }
    }
}

/// Counts that the guest wrote to its console.
async fn counts(machine: &dyn Machine) -> Vec<u32> {
    let console = machine.console(64 << 10).await;
    let text = String::from_utf8_lossy(&console);
    let number = |line: &str| {
        let digit = |number: u32, letter: u8| number << 4 | u32::from(letter.saturating_sub(b'A'));
        (line.len() == 8).then(|| line.bytes().fold(0, digit))
    };
    text.lines().filter_map(number).collect()
}

async fn last(machine: &dyn Machine) -> u32 {
    counts(machine).await.last().copied().unwrap_or(0)
}

/// Waits until the guest has counted beyond `count`; returns the first count that it wrote.
async fn beyond(machine: &dyn Machine, count: u32) -> Result<u32> {
    let begun = Instant::now();
    loop {
        let counts = counts(machine).await;
        if counts.last().is_some_and(|last| *last > count) {
            return counts.first().copied().context("none");
        }
        ensure!(begun.elapsed() < PATIENCE, "it does not count beyond {count}: {counts:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn pid(machine: &dyn Machine) -> Result<u32> {
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(machine.paths().dir.join("machine.json"))?)?;
    Ok(u32::try_from(record["pid"].as_u64().context("no pid")?)?)
}

fn status(pid: u32, field: &str) -> Result<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)).context("no such field")?;
    Ok(line.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_go_on_from_the_instant_and_outlive_everybody() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let parent = lab.boot().await?;
    assert_eq!(beyond(parent.as_ref(), 3).await?, 1, "it begins at one");
    let before = last(parent.as_ref()).await;
    let frozen = lab.freeze(parent.as_ref()).await?;
    let instant = last(parent.as_ref()).await;
    beyond(parent.as_ref(), instant + 3).await?;
    let mut children = Vec::new();
    for _ in 0..3 {
        children.push(lab.thaw(frozen.as_ref()).await?);
    }
    // A line may have been cut by the freeze.
    for child in &children {
        let first = beyond(child.as_ref(), instant + 2).await?;
        assert!((before.saturating_sub(1)..=instant + 2).contains(&first), "{first}: {before} to {instant}");
    }
    // Of a child, while its parent and the zygote between them go.
    let grandchild = lab.freeze(children[0].as_ref()).await?;
    parent.stop().await?;
    drop(frozen);
    for child in &children {
        let count = last(child.as_ref()).await;
        beyond(child.as_ref(), count + 2).await?;
    }
    children[0].stop().await?;
    let machine = lab.thaw(grandchild.as_ref()).await?;
    drop(grandchild);
    beyond(machine.as_ref(), instant + 4).await?;
    for machine in children.iter().chain([&machine]) {
        machine.stop().await?;
        assert_eq!(fs::read_dir(&machine.paths().dir)?.count(), 1, "only the run directory is left");
        assert_eq!(fs::read_dir(&machine.paths().run_dir)?.count(), 0);
    }
    lab.all_gone().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_machine_is_loaded_and_its_zygote_stays() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let parent = lab.boot().await?;
    beyond(parent.as_ref(), 3).await?;
    let before = last(parent.as_ref()).await;
    let frozen = lab.freeze(parent.as_ref()).await?;
    let instant = last(parent.as_ref()).await;
    parent.stop().await?;
    let manifest = frozen.persist().await?;
    let dir = frozen.image().dir.clone();
    let mut names: Vec<_> = fs::read_dir(&dir)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    names.sort();
    assert_eq!(names, ["layers", "manifest.json", "vm.mem", "vm.state"]);
    assert!(fs::metadata(dir.join("vm.mem"))?.blocks() * 512 < 4 << 20, "zeroes are holes");
    assert_eq!(keiki_snapshot::open(&dir)?, manifest);
    drop(frozen);
    lab.all_gone().await?;

    let load = |scope| lab.engine.load(&dir, scope);
    let workspace = Sharing::Workspace;
    let stored = load(Sharing::Node).await?;
    let again = load(Sharing::Node).await?;
    assert_eq!(lab.processes()?.len(), 1, "one zygote for one scope");
    let other = load(workspace).await?;
    assert_eq!(lab.processes()?.len(), 2, "another for another");
    let alone = load(Sharing::None).await?;
    let mut users = BTreeSet::new();
    for (frozen, count) in [(&stored, 2), (&again, 1), (&other, 1), (&alone, 2)] {
        for _ in 0..count {
            let machine = lab.thaw(frozen.as_ref()).await?;
            let first = beyond(machine.as_ref(), instant + 1).await?;
            assert!(
                (before.saturating_sub(1)..=instant + 2).contains(&first),
                "{first}: {before} to {instant}"
            );
            users.insert(status(pid(machine.as_ref())?, "Uid:")?);
            machine.stop().await?;
        }
    }
    if rustix::process::geteuid().is_root() {
        assert_eq!(users.len(), 4, "node, workspace, and each that is alone: {users:?}");
    }
    // The zygote is killed behind our back: another takes its place.
    for pid in lab.processes()? {
        let zygote = Process::open(pid)?.context("gone")?;
        zygote.kill()?;
        // Its memory, by which it is found, goes before it does.
        while zygote.is_alive() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    lab.all_gone().await?;
    let machine = lab.thaw(stored.as_ref()).await?;
    // A second generation of files, over the first.
    let second = lab.freeze(machine.as_ref()).await?;
    second.persist().await?;
    let loaded = lab.engine.load(&second.image().dir, Sharing::Node).await?;
    let before = lab.processes()?.len();
    lab.engine.forget(&dir).await;
    let begun = Instant::now();
    while lab.processes()?.len() == before {
        ensure!(begun.elapsed() < PATIENCE, "a zygote stays that nobody will use");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    fs::remove_dir_all(&dir)?;
    let grandchild = lab.thaw(loaded.as_ref()).await?;
    beyond(grandchild.as_ref(), instant + 2).await?;
    machine.stop().await?;
    grandchild.stop().await?;
    lab.engine.close().await;
    lab.all_gone().await
}

/// Zygotes that end between being picked and being asked. Stored files make another; one that was never stored is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_thaw_outlives_the_zygote_of_stored_files() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let parent = lab.boot().await?;
    beyond(parent.as_ref(), 3).await?;
    let fresh = lab.freeze(parent.as_ref()).await?;
    let (thawed, paths) = lab.thaw_without_zygote(&fresh, &[pid(parent.as_ref())?]).await?;
    let error = thawed.map(drop).err().context("thawed off nothing")?;
    assert!(error.to_string().contains("cannot be reached"), "{error}");
    assert_eq!(fs::read_dir(&paths.dir)?.count(), 1, "only the run directory is left");
    assert_eq!(fs::read_dir(&paths.run_dir)?.count(), 0);

    let frozen = lab.freeze(parent.as_ref()).await?;
    let instant = last(parent.as_ref()).await;
    parent.stop().await?;
    frozen.persist().await?;
    for scope in [Sharing::Node, Sharing::Workspace] {
        let stored = lab.engine.load(&frozen.image().dir, scope).await?;
        let (thawed, _) = lab.thaw_without_zygote(&stored, &[]).await?;
        let machine = thawed?;
        beyond(machine.as_ref(), instant + 2).await?;
        // The one that was loaded instead stays.
        let there = lab.processes()?;
        assert_eq!(there.len(), 2, "{there:?}");
        let again = lab.thaw(stored.as_ref()).await?;
        beyond(again.as_ref(), instant + 2).await?;
        assert_eq!(lab.processes()?.difference(&there).count(), 1);
        machine.stop().await?;
        again.stop().await?;
        lab.engine.close().await;
        lab.all_gone().await?;
    }
    Ok(())
}

/// Pages of a file that the kernel has in memory.
fn cached(file: &std::path::Path) -> Result<u64> {
    let output = std::process::Command::new("fincore").args(["-n", "-o", "PAGES"]).arg(file).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

/// Lets the kernel forget what it read of a file that nobody has mapped.
fn forget(file: &std::path::Path) -> Result<()> {
    let open = File::open(file)?;
    open.sync_all()?;
    rustix::fs::fadvise(&open, 0, None, rustix::fs::Advice::DontNeed)?;
    ensure!(cached(file)? == 0, "{} pages stay", cached(file)?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_first_run_touches_is_read_ahead() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let parent = lab.boot().await?;
    beyond(parent.as_ref(), 3).await?;
    let frozen = lab.freeze(parent.as_ref()).await?;
    parent.stop().await?;
    frozen.persist().await?;
    let (dir, count) = (frozen.image().dir.clone(), last(parent.as_ref()).await);
    let (memory, pages) = (dir.join("vm.mem"), dir.join("vm.pages"));
    drop(frozen);
    // A first run is looked at once: before it ends, or when it has run for a moment.
    let stored = lab.engine.load(&dir, Sharing::Node).await?;
    let machine = lab.thaw(stored.as_ref()).await?;
    tokio::time::sleep(Duration::from_millis(150)).await;
    machine.stop().await?;
    ensure!(pages.exists(), "a short run tells nothing");
    fs::remove_file(&pages)?;
    let machine = lab.thaw(stored.as_ref()).await?;
    beyond(machine.as_ref(), count + 2).await?;
    let begun = Instant::now();
    while !pages.exists() {
        ensure!(begun.elapsed() < PATIENCE, "nothing is recorded");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    machine.stop().await?;
    // The next one is given it before it runs.
    let prepared = lab.engine.prepare(stored.image(), lab.paths()?).await?;
    let (machine, steps) = stored.thaw(prepared).await?;
    ensure!(steps.0.iter().any(|(name, _)| name == "vmm_pages"), "nothing is given ahead: {steps:?}");
    beyond(machine.as_ref(), count + 2).await?;
    machine.stop().await?;
    drop(stored);
    // One that shares with nobody is not told what others touched.
    let alone = lab.engine.load(&dir, Sharing::None).await?;
    let prepared = lab.engine.prepare(alone.image(), lab.paths()?).await?;
    let (machine, steps) = alone.thaw(prepared).await?;
    ensure!(!steps.0.iter().any(|(name, _)| name == "vmm_pages"), "{steps:?}");
    machine.stop().await?;
    drop(alone);
    lab.engine.close().await;
    lab.all_gone().await?;
    assert_eq!(keiki_snapshot::open(&dir)?.memory.bytes, u64::from(SHAPE.memory_mib) << 20);
    let recorded = fs::read(&pages)?;

    // On a host that has read nothing of the memory, a load reads that, before there is a machine.
    let damaged = [&recorded[..], b"x"].concat();
    for (content, is_read) in [(Some(&recorded), true), (None, false), (Some(&damaged), false)] {
        match content {
            Some(content) => fs::write(&pages, content)?,
            None => fs::remove_file(&pages)?,
        }
        forget(&memory)?;
        let engine = lab.another()?;
        let stored = engine.load(&dir, Sharing::Node).await?;
        let begun = Instant::now();
        while is_read && cached(&memory)? == 0 {
            ensure!(begun.elapsed() < PATIENCE, "nothing is read");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if !is_read {
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert!(!pages.exists(), "a damaged one stays, and no other is recorded");
            assert_eq!(cached(&memory)?, 0, "who told it to read that?");
        }
        let machine = lab.thaw(stored.as_ref()).await?;
        beyond(machine.as_ref(), count + 2).await?;
        machine.stop().await?;
        drop(stored);
        engine.close().await;
        lab.all_gone().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_node_finds_machines_and_ends_what_was_not_recorded() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let machine = lab.boot().await?;
    beyond(machine.as_ref(), 2).await?;
    let frozen = lab.freeze(machine.as_ref()).await?;
    let child = lab.thaw(frozen.as_ref()).await?;
    let lost = lab.thaw(frozen.as_ref()).await?;
    let [one, two, three] = [&machine, &child, &lost].map(|machine| machine.paths().clone());
    child.pause().await?;
    let lost_pid = pid(lost.as_ref())?;
    drop((machine, child, lost, frozen));
    fs::remove_file(three.dir.join("machine.json"))?;

    let engine = lab.another()?;
    let machine = engine.adopt(&one).await?.context("not found")?;
    let count = last(machine.as_ref()).await;
    beyond(machine.as_ref(), count + 2).await?;
    let child = engine.adopt(&two).await?.context("its child was not found")?;
    let count = last(child.as_ref()).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(last(child.as_ref()).await, count, "its user had paused it");
    child.resume().await?;
    beyond(child.as_ref(), count + 1).await?;
    assert!(engine.adopt(&three).await?.is_none());
    assert!(!lab.processes()?.contains(&lost_pid), "it is on its way out while its files go");
    assert_eq!(fs::read_dir(&three.dir)?.count(), 1);
    let image = engine.image(&lab.fresh("f")?, SHAPE).await?;
    let (frozen, report) = machine.freeze(image).await?;
    assert!(report.vcpu_pause > Duration::ZERO && !report.steps.0.is_empty());
    let memory = machine.memory().await?;
    assert!(memory.rss_bytes >= memory.pss_bytes && memory.guest_bytes == 64 << 20, "{memory:?}");
    let again = frozen.thaw(engine.prepare(frozen.image(), lab.paths()?).await?).await?.0;
    drop(frozen);
    for machine in [machine, child, again] {
        machine.stop().await?;
    }
    lab.all_gone().await
}

/// The machine was told to read fewer layers, and the node did not live to record it: what the record names is there
/// still, and the machine is told to read that.
#[tokio::test(flavor = "multi_thread")]
async fn layers_that_were_made_one_unrecorded_are_told_apart() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let machine = lab.boot().await?;
    let paths = machine.paths().clone();
    let path = paths.dir.join("machine.json");
    let record = || -> Result<serde_json::Value> { Ok(serde_json::from_slice(&fs::read(&path)?)?) };
    let layers = |record: &serde_json::Value| record["layers"].as_array().map_or(0, Vec::len);
    while layers(&record()?) < 8 {
        drop(lab.freeze(machine.as_ref()).await?);
    }
    // This one is too many: they are made one behind our back.
    let aside = lab.fresh("aside")?;
    for layer in fs::read_dir(paths.dir.join("layers"))? {
        let layer = layer?;
        fs::hard_link(layer.path(), aside.join(layer.file_name()))?;
    }
    drop(lab.freeze(machine.as_ref()).await?);
    let begun = Instant::now();
    let mut long = record()?;
    // Until the last of them is removed: two layers and the top are left.
    while fs::read_dir(paths.dir.join("layers"))?.count() > 3 {
        ensure!(begun.elapsed() < PATIENCE, "{} layers", layers(&record()?));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(machine);
    for name in long["layers"].as_array().context("no layers")? {
        let name = name["name"].as_str().context("no name")?;
        let link = paths.dir.join("layers").join(name);
        if !link.exists() {
            fs::hard_link(aside.join(name), link)?;
        }
    }
    long["unsure"] = true.into();
    fs::write(&path, long.to_string())?;

    let machine = lab.another()?.adopt(&paths).await?.context("not found")?;
    let before = record()?;
    assert_eq!((layers(&before), &before["unsure"]), (9, &false.into()));
    // By their number it is told whether a freeze that failed had switched the disk.
    let mut client = keiki_control::Client::connect(&paths.run_dir.join("control.sock"))?;
    let reply = client.call(&keiki_control::Request::Hello, &[], PATIENCE)?.reply;
    let keiki_control::Reply::Hello(hello) = reply else { anyhow::bail!("{reply:?}") };
    assert_eq!(hello.layers, 9);
    let count = last(machine.as_ref()).await;
    beyond(machine.as_ref(), count + 1).await?;
    machine.stop().await?;
    lab.all_gone().await
}

/// A process of the monitor's user, as one that a guest has taken over could fork.
struct Stranger(Process);

/// Are monitors in control groups here?
fn is_grouped() -> bool {
    fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").is_ok_and(|there| there.contains("memory"))
}

/// The control group of a process.
fn group_of(pid: u32) -> Result<PathBuf> {
    let group = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let group = group.trim().strip_prefix("0::/").context("no control group of version 2")?;
    Ok(PathBuf::from("/sys/fs/cgroup").join(group))
}

impl Stranger {
    fn new(user: u32, of: u32) -> Result<Self> {
        let mut command = std::process::Command::new("setpriv");
        let ids = [format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".into()];
        command.args(ids).args(["sleep", "7777"]);
        let (process, _) = Process::spawn(&mut command, Default::default())?;
        let stranger = Self(process);
        // A child is in its parent's control group.
        if is_grouped() {
            fs::write(group_of(of)?.join("cgroup.procs"), stranger.0.pid().to_string())?;
        }
        let begun = Instant::now();
        while !keiki_sys::process::of_user(user)?.iter().any(|process| process.pid() == stranger.0.pid()) {
            ensure!(begun.elapsed() < PATIENCE, "it does not run");
        }
        Ok(stranger)
    }

    async fn ends(&self) -> Result<()> {
        let begun = Instant::now();
        while self.0.is_alive() {
            ensure!(begun.elapsed() < PATIENCE, "what nobody asked for outlives the machine");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.try_reap();
    }
}

#[test]
fn what_a_monitor_forks_unasked_goes_with_it() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    if !is_root() {
        return Ok(());
    }
    // The first node's end is that of its runtime: nobody watches its machines any more.
    let (user, left) = tokio::runtime::Runtime::new()?.block_on(unasked_in_a_first_node(&lab))?;
    tokio::runtime::Runtime::new()?.block_on(unasked_in_a_later_node(&lab, user, left))
}

async fn unasked_in_a_first_node(lab: &Lab) -> Result<(u32, [VmPaths; 2])> {
    let parent = lab.boot().await?;
    beyond(parent.as_ref(), 1).await?;
    let user = status(pid(parent.as_ref())?, "Uid:")?.split(' ').next().context("no user")?.parse()?;
    let frozen = lab.freeze(parent.as_ref()).await?;
    let (child, other) = (lab.thaw(frozen.as_ref()).await?, lab.thaw(frozen.as_ref()).await?);
    let stranger = Stranger::new(user, pid(parent.as_ref())?)?;
    parent.stop().await?;
    stranger.ends().await?;
    // Relatives are no strangers.
    let machine = lab.thaw(frozen.as_ref()).await?;
    for machine in [&child, &other, &machine] {
        let count = last(machine.as_ref()).await;
        beyond(machine.as_ref(), count + 1).await?;
    }
    machine.stop().await?;
    Ok((user, [&child, &other].map(|machine| machine.paths().clone())))
}

/// It does not know at once who is whose.
async fn unasked_in_a_later_node(lab: &Lab, user: u32, [one, two]: [VmPaths; 2]) -> Result<()> {
    let engine = lab.another()?;
    let machine = engine.adopt(&one).await?.context("not found")?;
    let stranger = Stranger::new(user, pid(machine.as_ref())?)?;
    machine.stop().await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    // A control group tells whose it is.
    assert!(is_grouped() || stranger.0.is_alive(), "ended before all were found");
    let two = engine.adopt(&two).await?.context("a relative that was not found yet was ended")?;
    engine.adoption_finished();
    stranger.ends().await?;
    let count = last(two.as_ref()).await;
    beyond(two.as_ref(), count + 1).await?;
    two.stop().await?;
    lab.all_gone().await
}

/// The record says that a freeze was about to switch the disk; the machine knows whether it did.
#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_cut_short_is_mended() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let machine = lab.boot().await?;
    let paths = machine.paths().clone();
    let path = paths.dir.join("machine.json");
    let before = fs::read(&path)?;
    drop(lab.freeze(machine.as_ref()).await?);
    let after: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    drop(machine);
    let mut record: serde_json::Value = serde_json::from_slice(&before)?;
    record["next_top"] = after["top"].clone();
    fs::write(&path, record.to_string())?;
    let machine = lab.another()?.adopt(&paths).await?.context("not found")?;
    let mended: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    assert_eq!(mended, after, "it had switched");
    drop(machine);
    record = after.clone();
    record["next_top"] = "0123.qcow2".into();
    fs::write(paths.dir.join("layers/0123.qcow2"), "")?;
    fs::write(&path, record.to_string())?;
    let machine = lab.another()?.adopt(&paths).await?.context("not found")?;
    let mended: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    assert_eq!(mended, after, "it had not");
    assert!(!paths.dir.join("layers/0123.qcow2").exists());
    machine.stop().await?;
    lab.all_gone().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_disk_chain_becomes_short() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let machine = lab.boot().await?;
    let layers = |machine: &dyn Machine| -> Result<usize> {
        let text = fs::read(machine.paths().dir.join("machine.json"))?;
        let record: serde_json::Value = serde_json::from_slice(&text)?;
        Ok(record["layers"].as_array().context("no layers")?.len())
    };
    let mut frozen = lab.freeze(machine.as_ref()).await?;
    for _ in 0..12 {
        frozen = lab.freeze(machine.as_ref()).await?;
    }
    let begun = Instant::now();
    while layers(machine.as_ref())? > 8 {
        ensure!(begun.elapsed() < PATIENCE, "{} layers", layers(machine.as_ref())?);
        // One that came too late for the last freeze is made by the next.
        tokio::time::sleep(Duration::from_millis(500)).await;
        frozen = lab.freeze(machine.as_ref()).await?;
    }
    let count = last(machine.as_ref()).await;
    beyond(machine.as_ref(), count + 1).await?;
    let child = lab.thaw(frozen.as_ref()).await?;
    beyond(child.as_ref(), count).await?;
    // Generations one after the other: a lineage begins anew before the kernel has to walk too far.
    let mut machine = {
        machine.stop().await?;
        child
    };
    for _ in 0..36 {
        let frozen = lab.freeze(machine.as_ref()).await?;
        let next = lab.thaw(frozen.as_ref()).await?;
        machine.stop().await?;
        machine = next;
    }
    beyond(machine.as_ref(), count + 2).await?;
    machine.stop().await?;
    drop(frozen);
    lab.engine.close().await;
    lab.all_gone().await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_leaves_nothing() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    let machine = lab.boot().await?;
    beyond(machine.as_ref(), 1).await?;
    let frozen = lab.freeze(machine.as_ref()).await?;
    // A prepared VM that is cancelled, one that is dropped, one whose address is taken meanwhile.
    let [one, two, three] = [lab.paths()?, lab.paths()?, lab.paths()?];
    let prepared = lab.engine.prepare(frozen.image(), one.clone()).await?;
    assert!(prepared.is_alive());
    prepared.cancel().await;
    drop(lab.engine.prepare(frozen.image(), two.clone()).await?);
    let prepared = lab.engine.prepare(frozen.image(), three.clone()).await?;
    fs::remove_file(three.run_dir.join("control.sock"))?;
    let thawed = frozen.thaw(prepared).await.map(drop).map_err(|error| error.to_string());
    assert!(thawed.is_err(), "{thawed:?}");
    for paths in [&one, &two, &three] {
        assert_eq!(fs::read_dir(&paths.dir)?.count(), 1, "{}", paths.dir.display());
        assert_eq!(fs::read_dir(&paths.run_dir)?.count(), 0);
    }
    // A kernel that is none, a state that is damaged in a way that only its reader can see.
    fs::write(lab.dir.path().join("kernel"), "no kernel")?;
    let booted = lab.boot().await.map(drop).map_err(|error| format!("{error:#}"));
    assert!(booted.as_ref().is_err_and(|why| why.contains("kernel")), "{booted:?}");
    let mut manifest = frozen.persist().await?;
    let dir = frozen.image().dir.clone();
    let mut state = fs::read(dir.join("vm.state"))?;
    state[8] ^= 0xff;
    fs::write(dir.join("vm.state"), &state)?;
    manifest.state.blake3 = blake3::hash(&state).to_hex().to_string();
    keiki_snapshot::write_manifest(&dir, &manifest)?;
    let loaded = lab.engine.load(&dir, Sharing::Node).await.map(drop);
    assert!(matches!(&loaded, Err(EngineError::Refused { dir: of, .. }) if *of == dir), "{loaded:?}");
    manifest.made_by.engine = keiki_types::EngineKind::Qemu;
    keiki_snapshot::write_manifest(&dir, &manifest)?;
    let loaded = lab.engine.load(&dir, Sharing::Node).await.map(drop).map_err(|error| error.to_string());
    assert!(loaded.is_err_and(|why| why.contains("made by engine qemu, this is kvm")));
    let count = last(machine.as_ref()).await;
    beyond(machine.as_ref(), count + 1).await?;
    machine.stop().await?;
    let ended = machine.freeze(lab.engine.image(&lab.fresh("f")?, SHAPE).await?).await.map(drop);
    assert!(ended.is_err(), "{ended:?}");
    drop(frozen);
    lab.engine.close().await;
    lab.all_gone().await
}

/// A monitor has a user that no other lineage has, and no file that it could write but its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_monitor_has_nothing_but_its_machine() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    if !is_root() {
        return Ok(());
    }
    let machine = lab.boot().await?;
    let other = lab.boot().await?;
    let frozen = lab.freeze(machine.as_ref()).await?;
    let child = lab.thaw(frozen.as_ref()).await?;
    let user = |machine: &dyn Machine| status(pid(machine)?, "Uid:");
    assert_eq!(user(machine.as_ref())?, user(child.as_ref())?, "relatives share a user");
    assert_ne!(user(machine.as_ref())?, user(other.as_ref())?);
    let id: u32 = user(child.as_ref())?.split(' ').next().context("no user")?.parse()?;
    assert!((FIRST_USER..FIRST_USER + USERS).contains(&id));
    if is_grouped() {
        let [one, two] = [group_of(pid(machine.as_ref())?)?, group_of(pid(child.as_ref())?)?];
        assert_ne!(one, two, "each has a group of its own");
        assert_eq!(one.parent(), two.parent(), "below that of their lineage");
        let limit = |group: &std::path::Path, name: &str| fs::read_to_string(group.join(name));
        // The machine, its zygote, its child: each with its guest's memory, and as much again for itself.
        let sum = 3 * (u64::from(SHAPE.memory_mib) << 21);
        let lineage = one.parent().context("no group above")?;
        assert_eq!(limit(lineage, "memory.max")?.trim(), sum.to_string());
        assert_eq!(limit(&one, "pids.max")?.trim(), "512");
    }
    let mut stderr_pipes = BTreeSet::new();
    for machine in [&machine, &child] {
        let pid = pid(machine.as_ref())?;
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(status(pid, set)?, "0000000000000000", "{set}");
        }
        let stderr = fs::read_link(format!("/proc/{pid}/fd/2"))?;
        let ours = fs::read_dir("/proc/self/fd")?.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        assert_eq!(
            ours.filter(|fd| *fd == stderr).count(),
            1,
            "no reader for its standard error: {stderr:?}"
        );
        stderr_pipes.insert(stderr);
        assert_eq!((status(pid, "NoNewPrivs:")?, status(pid, "Seccomp:")?), ("1".into(), "2".into()));
        let dir = machine.paths().dir.clone();
        for layer in fs::read_dir(dir.join("layers"))? {
            let meta = layer?.metadata()?;
            assert_eq!(meta.uid(), 0, "layers are root's");
        }
        UnixStream::connect(machine.agent_socket())?;
    }
    assert_eq!(stderr_pipes.len(), 2, "messages of the two machines would be mixed up");
    // Of its base files it can write none: the layer that both have is not the inode that the parent wrote.
    let writable = writable(pid(machine.as_ref())?)?;
    for entry in fs::read_dir(frozen.image().dir.join("layers"))? {
        let meta = entry?.metadata()?;
        assert!(!writable.contains(&meta.ino()), "a base file that its writer can still write");
    }
    for machine in [machine, other, child] {
        machine.stop().await?;
    }
    Ok(())
}

/// Inodes of regular files that the process has open for writing.
fn writable(pid: u32) -> Result<BTreeSet<u64>> {
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Ok(meta) = fs::metadata(entry.path()) else { continue };
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", entry.file_name().to_string_lossy()))?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).context("no flags")?;
        if meta.is_file() && u32::from_str_radix(flags.trim(), 8)? & 3 != 0 {
            files.insert(meta.ino());
        }
    }
    Ok(files)
}
