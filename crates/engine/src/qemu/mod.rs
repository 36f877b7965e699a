//! The portable engine: system QEMU, software emulation, on any Linux host.
//!
//! ```text
//!   resources.dir/vm.mem          hard link of the memory image it runs on, never written
//!   resources.dir/layers/*        hard links of its disk's lower layers, and its own top
//!   resources.dir/machine.json    how to find it again
//!   resources.dir/console.log[.1] what its guest said
//!   resources.run_dir/*.sock      control, agent, console
//! ```
//!
//! - `args`: the command line, and the digest of what the guest sees of it
//! - `process`, `qmp`, `console`: a monitor, its control socket, its console
//! - `disk`: layers and block nodes
//! - `jail`: what a monitor may touch; `cgroup`: how much of the host it may use
//! - `machine`: a machine that runs
//! - `chain`: disk chains kept short
//! - `freeze`: memory, device state and disk at one instant
//! - `ram`: the library in QEMU that maps guest RAM
//! - `thaw`: seats, and frozen machines that go on in them
//! - `adopt`: machines found again; `record`: the file that tells of them
//!
//! The store must be one filesystem with reflinks and hard links (XFS, btrfs): layers and memory images
//! are shared between directories by hard links, so removing any directory breaks no other.

mod adopt;
mod args;
mod cgroup;
mod chain;
mod console;
mod disk;
#[cfg(test)]
mod equal;
mod freeze;
mod jail;
mod machine;
mod memory;
mod process;
mod qmp;
mod ram;
mod record;
mod thaw;

pub use jail::{FIRST_USER, USERS};

use crate::{BootSpec, Capabilities, Engine, EngineError, Frozen, Image, Machine, Resources, Result, Seat};
use async_trait::async_trait;
use keiki_snapshot::{LAYERS_DIR, MEMORY_FILE, Made, SnapshotError};
use keiki_types::{EngineKind, Shape};
use process::blocking;
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
};

/// What the engine is told.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// `qemu-system-x86_64`.
    pub binary: PathBuf,
    /// `qemu-img`.
    pub qemu_img: PathBuf,
    /// A directory of the engine's own, on the filesystem of all machines and snapshots.
    pub store: PathBuf,
    /// First of the [`USERS`] user and group numbers that monitors run as, each as another one, jailed. None:
    /// monitors run as this process does.
    pub first_user: Option<u32>,
}

impl QemuConfig {
    /// The programs found by `PATH`; jailed where this process is root.
    #[must_use]
    pub fn new(store: PathBuf) -> Self {
        let first_user = rustix::process::geteuid().is_root().then_some(FIRST_USER);
        Self { binary: "qemu-system-x86_64".into(), qemu_img: "qemu-img".into(), store, first_user }
    }
}

/// The engine.
pub struct Qemu {
    host: Arc<Host>,
}

/// What all machines of the engine share.
struct Host {
    config: QemuConfig,
    users: jail::Users,
    version: tokio::sync::OnceCell<String>,
    tsc_khz: tokio::sync::OnceCell<Option<u64>>,
}

impl Qemu {
    /// Does nothing yet: see [`Engine::probe`].
    #[must_use]
    pub fn new(config: QemuConfig) -> Self {
        let (users, version, tsc_khz) = Default::default();
        Self { host: Arc::new(Host { config, users, version, tsc_khz }) }
    }
}

impl Host {
    /// QEMU's version, as it prints it. Asked once.
    async fn version(&self) -> Result<&str> {
        let ask = || async {
            let binary = self.config.binary.clone();
            blocking(move || {
                let output = std::process::Command::new(&binary).arg("--version").output();
                let output = output.map_err(EngineError::at("run", &binary))?;
                let text = String::from_utf8_lossy(&output.stdout);
                let first = text.lines().next().unwrap_or_default();
                match first.strip_prefix("QEMU emulator version ") {
                    Some(version) => Ok(version.chars().take(100).collect()),
                    None => Err(EngineError::Monitor("does not tell its version".into())),
                }
            })
            .await
        };
        self.version.get_or_try_init(ask).await.map(String::as_str)
    }

    /// What a snapshot made here says of its maker.
    async fn made(&self, shape: Shape) -> Result<Made> {
        let version = self.version().await?.to_owned();
        Ok(Made { engine: EngineKind::Qemu, version, machine: args::machine_digest(shape) })
    }

    async fn tsc_khz(&self) -> Option<u64> {
        let measure = || async { blocking(|| Ok(keiki_sys::tsc::tsc_khz())).await.unwrap_or_default() };
        *self.tsc_khz.get_or_init(measure).await
    }
}

/// Makes the empty directories and the memory file that a machine starts with.
fn make_layers_dir(dir: &Path) -> Result<()> {
    let layers = dir.join(LAYERS_DIR);
    fs::create_dir_all(&layers).map_err(EngineError::at("make", &layers))
}

fn make_memory(dir: &Path, shape: Shape) -> Result<()> {
    let path = dir.join(MEMORY_FILE);
    let file =
        File::options().write(true).create_new(true).open(&path).map_err(EngineError::at("make", &path))?;
    file.set_len(u64::from(shape.memory_mib) << 20).map_err(EngineError::at("size", &path))?;
    jail::show(&path)
}

#[async_trait]
impl Engine for Qemu {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }

    async fn probe(&self) -> Capabilities {
        let host = Arc::clone(&self.host);
        let version = host.version().await.map(str::to_owned);
        let store = blocking(move || {
            probe_store(&host.config)?;
            jail::probe(&host)
        })
        .await;
        let (usable, version, note) = match (version, store) {
            (Ok(version), Ok(jail)) => {
                (true, version, format!("software emulation, works everywhere; {jail}; {}", cgroup::note()))
            }
            (Ok(version), Err(error)) => (false, version, sentence(&error)),
            (Err(error), _) => (false, String::new(), sentence(&error)),
        };
        Capabilities { kind: EngineKind::Qemu, usable, version, note }
    }

    async fn boot(&self, spec: &BootSpec, resources: Resources) -> Result<Box<dyn Machine>> {
        Ok(Box::new(machine::boot(&self.host, spec, resources).await?))
    }

    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> {
        let dir = dir.to_owned();
        let jailed = self.host.config.first_user.is_some();
        blocking(move || {
            if jailed {
                jail::hide(&dir)?;
            }
            make_memory(&dir, shape).map(|()| Image { dir, shape })
        })
        .await
    }

    async fn seat(&self, image: &Image, resources: Resources) -> Result<Box<dyn Seat>> {
        Ok(Box::new(thaw::QemuSeat::start(&self.host, image, resources).await?))
    }

    async fn load(&self, dir: &Path) -> Result<Arc<dyn Frozen>> {
        let path = dir.to_owned();
        let refused = |why| EngineError::Refused { dir: dir.to_owned(), why };
        let manifest = blocking(move || {
            let manifest = keiki_snapshot::open(&path).map_err(|error| refusal(&path, error))?;
            disk::check_layers(&path, &manifest.layers, manifest.shape.disk_mib)
                .map_err(|why| EngineError::Refused { dir: path, why })?;
            Ok(manifest)
        })
        .await?;
        let here = self.host.made(manifest.shape).await?;
        let made = &manifest.made_by;
        if made.engine != here.engine {
            return Err(refused(format!("it was made by engine {}, this is {}", made.engine, here.engine)));
        }
        if made.version != here.version {
            return Err(refused(format!("it was made by QEMU {}, this is {}", made.version, here.version)));
        }
        if made.machine != here.machine {
            return Err(refused("its machine has other devices than this program's".into()));
        }
        Ok(Arc::new(thaw::QemuFrozen::new(&self.host, dir, manifest)))
    }

    async fn adopt(&self, resources: &Resources) -> Result<Option<Box<dyn Machine>>> {
        Ok(adopt::adopt(&self.host, resources).await?.map(|machine| Box::new(machine) as Box<dyn Machine>))
    }
}

/// An error and its causes in one line.
fn sentence(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn refusal(dir: &Path, error: SnapshotError) -> EngineError {
    match error {
        SnapshotError::Io { path, source } => EngineError::at("use", &path)(source),
        other => EngineError::Refused { dir: dir.to_owned(), why: other.to_string() },
    }
}

/// Can the store share blocks?
fn probe_store(config: &QemuConfig) -> Result<()> {
    fs::create_dir_all(&config.store).map_err(EngineError::at("make", &config.store))?;
    let name = uuid::Uuid::now_v7().simple().to_string();
    let (from, to) = (config.store.join(format!(".{name}.a")), config.store.join(format!(".{name}.b")));
    let probe = || -> std::io::Result<()> {
        fs::write(&from, [1; 4096])?;
        keiki_sys::files::reflink(File::open(&from)?, File::create_new(&to)?)
    };
    let result = probe().map_err(EngineError::at("share blocks (reflink) in", &config.store));
    process::remove_file(&from)?;
    process::remove_file(&to)?;
    result
}
