//! The portable engine: system QEMU, software emulation, on any Linux host.
//!
//! ```text
//!   paths.dir/vm.mem          hard link of the memory image it runs on, never written
//!   paths.dir/layers/*        hard links of its disk's lower layers, and its own top
//!   paths.dir/machine.json    how to find it again
//!   paths.dir/console.log[.1] what its guest said
//!   paths.run_dir/*.sock      control, agent, console
//! ```
//!
//! What both engines share lies beside this directory: layers, users, records, control groups.
//!
//! - `args`: the command line, and the digest of what the guest sees of it
//! - `process`, `qmp`, `console`: a monitor, its control socket, its console
//! - `disk`: block nodes
//! - `jail`: what a monitor may touch
//! - `machine`: a machine that runs
//! - `chain`: disk chains kept short
//! - `freeze`: memory, device state and disk at one instant
//! - `ram`: the library in QEMU that maps guest RAM
//! - `thaw`: prepared VMs, and frozen machines that go on in them
//! - `adopt`: machines found again
//!
//! The store must be one filesystem with reflinks and hard links (XFS, btrfs): layers and memory images
//! are shared between directories by hard links, so removing any directory breaks no other.

mod adopt;
mod args;
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
mod thaw;

pub(crate) use thaw::WaitingVm;

use crate::{
    BootSpec, Capabilities, Common, Engine, EngineError, Frozen, Image, Machine, PreparedVm, Result,
    SharingScope, VmPaths, cgroup,
    files::{make_memory, probe_store, refusal, sentence},
    layers::check_layers,
    process::blocking,
    users::{Users, hide},
};
use async_trait::async_trait;
use keiki_snapshot::Made;
use keiki_types::{EngineKind, Shape};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// What the engine is told.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// `qemu-system-x86_64`.
    pub binary: PathBuf,
    /// What every engine is told.
    pub common: Common,
}

impl QemuConfig {
    /// The program found by `PATH`.
    #[must_use]
    pub fn new(store: PathBuf) -> Self {
        Self { binary: "qemu-system-x86_64".into(), common: Common::new(store) }
    }
}

/// The engine.
pub struct Qemu {
    host: Arc<Host>,
}

/// What all machines of the engine share.
struct Host {
    config: QemuConfig,
    users: Users,
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

#[async_trait]
impl Engine for Qemu {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }

    async fn probe(&self) -> Capabilities {
        let host = Arc::clone(&self.host);
        let version = host.version().await.map(str::to_owned);
        let store = blocking(move || {
            probe_store(&host.config.common)?;
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

    async fn boot(&self, spec: &BootSpec, paths: VmPaths) -> Result<Box<dyn Machine>> {
        Ok(Box::new(machine::boot(&self.host, spec, paths).await?))
    }

    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> {
        let dir = dir.to_owned();
        let jailed = self.host.config.common.first_user.is_some();
        blocking(move || {
            if jailed {
                hide(&dir)?;
            }
            make_memory(&dir, shape).map(|()| Image { dir, shape, alone: false })
        })
        .await
    }

    async fn prepare(&self, image: &Image, paths: VmPaths) -> Result<PreparedVm> {
        thaw::prepare(&self.host, image, paths).await
    }

    async fn load(&self, dir: &Path, scope: SharingScope) -> Result<Arc<dyn Frozen>> {
        let path = dir.to_owned();
        let refused = |why| EngineError::Refused { dir: dir.to_owned(), why };
        let manifest = blocking(move || {
            let manifest = keiki_snapshot::open(&path).map_err(|error| refusal(&path, error))?;
            check_layers(&path, &manifest.layers, manifest.shape.disk_mib)
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
        let frozen = thaw::QemuFrozen::new(&self.host, dir, manifest);
        Ok(Arc::new(frozen.alone(scope == SharingScope::None)))
    }

    async fn adopt(&self, paths: &VmPaths) -> Result<Option<Box<dyn Machine>>> {
        Ok(adopt::adopt(&self.host, paths).await?.map(|machine| Box::new(machine) as Box<dyn Machine>))
    }

    async fn close(&self) {}
}
