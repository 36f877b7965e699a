//! A real guest for the tests: a kernel package, busybox, and a shell on the agent port.
//!
//! `KEIKI_TEST_KERNEL_DIR` names an unpacked kernel package (`boot/vmlinuz-*`, `lib/modules/*`). Needed
//! beside it: a static busybox (`KEIKI_TEST_BUSYBOX`, default `/bin/busybox`), `xz`, and a directory on a
//! filesystem with reflinks (`KEIKI_TEST_STORE`).
//!
//! `KEIKI_ENGINE` says which engine is tested, `qemu` if it is not set. `kvm` needs `KEIKI_TEST_VMM`, the monitor.
#![allow(dead_code)]

use anyhow::{Context, Result, bail};
use keiki_engine::{
    BootSpec, Common, Engine, FreezeReport, Frozen, Machine, VmPaths,
    kvm::{Kvm, KvmConfig},
    qemu::{Qemu, QemuConfig},
};
use keiki_sys::{process::Process, stopwatch::Steps};
use keiki_testing::skip;
use keiki_types::Shape;
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

pub const SHAPE: Shape = Shape { vcpus: 1, memory_mib: 256, disk_mib: 256 };
const PATIENCE: Duration = Duration::from_secs(60);

/// A place for one test, removed with everything in it.
pub struct Lab {
    pub engine: Box<dyn Engine>,
    pub dir: TempDir,
    kernel: PathBuf,
    initrd: PathBuf,
    count: AtomicU32,
}

/// None, with a message, where there is nothing to run a guest with.
pub fn lab() -> Result<Option<Lab>> {
    let Some(package) = std::env::var_os("KEIKI_TEST_KERNEL_DIR").map(PathBuf::from) else {
        skip("guest", "KEIKI_TEST_KERNEL_DIR is not set, no guest kernel to test with");
        return Ok(None);
    };
    let store = std::env::var_os("KEIKI_TEST_STORE").map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::Builder::new().prefix("keiki-engine-").tempdir_in(store)?;
    let kernel = first(&package.join("boot"), "vmlinuz")?;
    let initrd = dir.path().join("initrd");
    fs::write(&initrd, initramfs(&package)?)?;
    File::create(dir.path().join("disk.raw"))?.set_len(u64::from(SHAPE.disk_mib) << 20)?;
    let engine = engine(dir.path().join("store"))?;
    Ok(Some(Lab { engine, dir, kernel, initrd, count: AtomicU32::new(0) }))
}

/// Of QEMU's own: None, with a message, where another engine is tested.
pub fn qemu_lab() -> Result<Option<Lab>> {
    if is_kvm() {
        skip("engine", "a test of the other engine");
        return Ok(None);
    }
    lab()
}

/// Of our own monitor's: None, with a message, where another engine is tested.
pub fn kvm_lab() -> Result<Option<Lab>> {
    if !is_kvm() {
        skip("engine", "a test of the other engine");
        return Ok(None);
    }
    lab()
}

pub fn is_kvm() -> bool {
    std::env::var_os("KEIKI_ENGINE").is_some_and(|engine| engine == "kvm")
}

/// The engine that is tested, on this store. Each call is another one.
pub fn engine(store: PathBuf) -> Result<Box<dyn Engine>> {
    if !is_kvm() {
        return Ok(Box::new(Qemu::new(QemuConfig::new(store))));
    }
    let binary =
        std::env::var_os("KEIKI_TEST_VMM").context("KEIKI_TEST_VMM does not say where keiki-vmm is")?;
    Ok(Box::new(Kvm::new(KvmConfig { binary: binary.into(), forced: true, common: Common::new(store) })))
}

impl Drop for Lab {
    fn drop(&mut self) {
        end_machines(self.dir.path());
    }
}

/// Ends what a failed test left running: monitors outlive those who started them.
pub fn end_machines(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(text) = fs::read(entry.path().join("machine.json")) else { continue };
        let record: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        let field = |name: &str| record.get(name).and_then(serde_json::Value::as_u64);
        let Some((pid, start)) = field("pid").zip(field("start_time")) else { continue };
        let Ok(Some(process)) = Process::open(u32::try_from(pid).unwrap_or_default()) else { continue };
        if process.start_time() == start && process.kill().is_ok() {
            while process.try_reap().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

fn first(dir: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut names: Vec<_> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    names.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
    names.into_iter().next().with_context(|| format!("no {prefix}* in {}", dir.display()))
}

impl Lab {
    pub fn fresh(&self, name: &str) -> Result<PathBuf> {
        let dir = self.dir.path().join(format!("{name}-{}", self.count.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&dir)?;
        Ok(dir)
    }

    pub fn paths(&self) -> Result<VmPaths> {
        let dir = self.fresh("m")?;
        let run_dir = dir.join("run");
        fs::create_dir(&run_dir)?;
        Ok(VmPaths { dir, run_dir, netns: None })
    }

    pub fn spec(&self) -> BootSpec {
        let disk = self.dir.path().join("disk.raw");
        let (kernel, initrd) = (self.kernel.clone(), self.initrd.clone());
        BootSpec {
            shape: SHAPE,
            kernel,
            initrd,
            disk,
            cmdline: std::env::var("KEIKI_TEST_CMDLINE").unwrap_or_default(),
        }
    }

    pub async fn boot(&self) -> Result<Guest> {
        let machine = self.engine.boot(&self.spec(), self.paths()?).await?;
        Guest::connect(machine).await
    }

    pub async fn freeze(&self, machine: &dyn Machine) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let image = self.engine.image(&self.fresh("f")?, machine.shape()).await?;
        Ok(machine.freeze(image).await?)
    }

    pub async fn thaw(&self, frozen: &dyn Frozen) -> Result<Guest> {
        Ok(self.thaw_timed(frozen).await?.0)
    }

    pub async fn thaw_timed(&self, frozen: &dyn Frozen) -> Result<(Guest, Steps, Duration)> {
        let started = Instant::now();
        let prepared = self.engine.prepare(frozen.image(), self.paths()?).await?;
        let took = started.elapsed();
        let (machine, steps) = frozen.thaw(prepared).await?;
        Ok((Guest::connect(machine).await?, steps, took))
    }
}

/// A machine and a shell in it.
pub struct Guest {
    pub machine: Box<dyn Machine>,
    stream: UnixStream,
    unread: Vec<u8>,
    serial: u32,
}

impl Guest {
    /// Connects to the shell and waits until it answers. The guest drops what it was told before it noticed
    /// that the port is new, so the question is repeated.
    pub async fn connect(machine: Box<dyn Machine>) -> Result<Self> {
        let stream = UnixStream::connect(machine.agent_socket()).await?;
        let mut guest = Self { machine, stream, unread: Vec::new(), serial: 0 };
        let mark = format!("<<HELLO {}>>", guest.machine.paths().dir.display());
        let wanted = format!("{mark}\n");
        let hello = async {
            loop {
                guest.stream.write_all(format!("echo '{mark}'\n").as_bytes()).await?;
                let answered = guest.until(&wanted);
                if timeout(Duration::from_millis(300), answered).await.is_ok() {
                    return anyhow::Ok(());
                }
            }
        };
        let why = match timeout(PATIENCE, hello).await {
            Ok(Ok(())) => return Ok(guest),
            Ok(Err(error)) => format!("the guest cannot be asked ({error:#})"),
            Err(_) => "the guest does not answer".into(),
        };
        bail!("{why}; {}", guest.console_tail().await);
    }

    /// Runs a line in the guest's shell and returns what it printed.
    pub async fn sh(&mut self, line: &str) -> Result<String> {
        self.serial += 1;
        let mark = format!("<<DONE {} {}>>\n", std::process::id(), self.serial);
        let command = format!("{line}\necho '{}'\n", mark.trim());
        let answer = async {
            self.stream.write_all(command.as_bytes()).await?;
            self.until(&mark).await
        };
        let output = match timeout(PATIENCE, answer).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) => bail!("no answer to {line} ({error:#}); {}", self.console_tail().await),
            Err(_) => bail!("no answer to {line}; {}", self.console_tail().await),
        };
        let clean: Vec<_> = output.lines().filter(|line| !line.starts_with("<<")).collect();
        Ok(clean.join("\n"))
    }

    async fn console_tail(&self) -> String {
        let console = self.machine.console(4000).await;
        format!("its console: {}", String::from_utf8_lossy(&console))
    }

    async fn until(&mut self, mark: &str) -> Result<String> {
        loop {
            let text = String::from_utf8_lossy(&self.unread).into_owned();
            if let Some(at) = text.find(mark) {
                self.unread = text.as_bytes().get(at + mark.len()..).unwrap_or_default().to_vec();
                return Ok(text.get(..at).unwrap_or_default().to_owned());
            }
            let mut buffer = [0; 4096];
            let count = self.stream.read(&mut buffer).await?;
            if count == 0 {
                bail!("the agent port closed");
            }
            self.unread.extend(buffer.iter().take(count));
        }
    }
}

const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
for m in virtio_mmio virtio_blk virtio-rng virtio_balloon failover net_failover virtio_net; do insmod /m/$m.ko; done
echo init
(n=0; while :; do n=$((n+1)); echo $n > /tmp/n.new; mv /tmp/n.new /tmp/n; echo "tick $n"; sleep 0.1; done) &
until [ "$port" ]; do
  for p in /sys/class/virtio-ports/*; do
    [ "$(cat $p/name)" = keiki.agent.0 ] && port=/dev/${p##*/}
  done
done
while :; do
  # A shell that ends when the host's end closes.
  sh <>$port >&0 2>&1
  sleep 0.02
done
"#;

fn initramfs(package: &Path) -> Result<Vec<u8>> {
    let modules = first(&package.join("lib/modules"), "")?.join("kernel");
    let busybox = std::env::var_os("KEIKI_TEST_BUSYBOX").map_or_else(|| "/bin/busybox".into(), PathBuf::from);
    let mut archive = Vec::new();
    for dir in ["bin", "m", "proc", "sys", "dev", "tmp"] {
        entry(&mut archive, dir, 0o040_755, &[])?;
    }
    entry(&mut archive, "init", 0o100_755, INIT.as_bytes())?;
    let busybox =
        fs::read(&busybox).with_context(|| format!("no static busybox at {}", busybox.display()))?;
    entry(&mut archive, "bin/busybox", 0o100_755, &busybox)?;
    for module in [
        "drivers/virtio/virtio_mmio",
        "drivers/block/virtio_blk",
        "drivers/char/hw_random/virtio-rng",
        "drivers/virtio/virtio_balloon",
        "net/core/failover",
        "drivers/net/net_failover",
        "drivers/net/virtio_net",
    ] {
        let path = modules.join(format!("{module}.ko.xz"));
        let output = Command::new("xz").arg("-dc").arg(&path).output()?;
        if !output.status.success() {
            bail!("cannot unpack {}", path.display());
        }
        let name = module.rsplit('/').next().unwrap_or_default();
        entry(&mut archive, &format!("m/{name}.ko"), 0o100_644, &output.stdout)?;
    }
    entry(&mut archive, "TRAILER!!!", 0, &[])?;
    Ok(archive)
}

/// One file of a cpio archive in the "newc" format.
fn entry(archive: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) -> Result<()> {
    let inode = archive.len();
    write!(archive, "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}{2:08x}", 0, 1, data.len())?;
    write!(archive, "{0:08x}{0:08x}{0:08x}{0:08x}{1:08x}{0:08x}{name}\0", 0, name.len() + 1)?;
    let pad = |archive: &mut Vec<u8>| archive.resize(archive.len().next_multiple_of(4), 0);
    pad(archive);
    archive.extend(data);
    pad(archive);
    Ok(())
}
