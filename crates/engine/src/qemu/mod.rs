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
//! - `host`: what all machines share
//! - `args`: the command line, and the digest of the part that the guest sees
//! - `monitor`, `qmp`: a QEMU process, and its control socket
//! - `disk`: block nodes
//! - `jail`: what a monitor may touch
//! - `ram`: the library in QEMU that maps guest RAM
//! - `boot`, `running`, `backend`: a machine from its first boot on
//! - `freeze`, `ram_copy`: memory, device state and disk at one instant
//! - `chain`: disk chains kept short
//! - `waiting`, `frozen`: prepared VMs, and the frozen machines that continue in them
//!
//! The store must be one filesystem with reflinks and hard links (XFS, btrfs): layers and memory
//! images are shared between directories by hard links, so removing any directory breaks no other.

mod args;
mod backend;
mod boot;
mod chain;
mod disk;
#[cfg(test)]
mod equal;
mod freeze;
mod frozen;
mod host;
mod jail;
mod monitor;
mod qmp;
mod ram;
mod ram_copy;
mod running;
pub(crate) mod waiting;

pub use host::QemuConfig;
#[cfg(test)]
pub(crate) use running::QemuPart;

use crate::{
    BootSpec, Capabilities, Engine, Frozen, Image, Machine, PreparedVm, Result, VmPaths, cgroup,
    files::{make_memory, open_snapshot, probe_store},
    machine,
    prepared::Waiting,
    process::blocking,
    record::or_clear,
    users::chmod_private,
};
use async_trait::async_trait;
use frozen::QemuFrozen;
use host::{Host, made};
use keiki_sys::error_chain;
use keiki_types::{EngineKind, Shape, Sharing};
use running::QemuBackend;
use std::{path::Path, sync::Arc};
use waiting::WaitingVm;

/// The engine.
pub struct Qemu {
    host: Arc<Host>,
}

impl Qemu {
    /// Does nothing yet: see [`Engine::probe`].
    #[must_use]
    pub fn new(config: QemuConfig) -> Self {
        Self { host: Arc::new(Host::new(config)) }
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
            (Ok(version), Err(error)) => (false, version, error_chain(&error)),
            (Err(error), _) => (false, String::new(), error_chain(&error)),
        };
        Capabilities { kind: EngineKind::Qemu, usable, version, note }
    }

    async fn boot(&self, spec: &BootSpec, paths: VmPaths) -> Result<Box<dyn Machine>> {
        Ok(Box::new(or_clear(&paths, boot::boot(&self.host, spec, &paths)).await?))
    }

    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> {
        let dir = dir.to_owned();
        let jailed = self.host.config.common.first_user.is_some();
        blocking(move || {
            if jailed {
                chmod_private(&dir)?;
            }
            make_memory(&dir, shape).map(|()| Image { dir, shape, alone: false })
        })
        .await
    }

    async fn prepare(&self, image: &Image, paths: VmPaths) -> Result<PreparedVm> {
        let vm = or_clear(&paths, WaitingVm::start(&self.host, image, &paths)).await?;
        Ok(PreparedVm::new(image, paths, Waiting::Qemu(Box::new(vm))))
    }

    async fn load(&self, dir: &Path, sharing: Sharing) -> Result<Arc<dyn Frozen>> {
        let (version, path) = (self.host.version().await?.to_owned(), dir.to_owned());
        let manifest = blocking(move || open_snapshot(&path, |shape| made(&version, shape))).await?;
        Ok(Arc::new(QemuFrozen::new(&self.host, dir, manifest).alone(sharing == Sharing::None)))
    }

    async fn adopt(&self, paths: &VmPaths) -> Result<Option<Box<dyn Machine>>> {
        machine::adopt::<QemuBackend>(&self.host, paths).await
    }

    async fn close(&self) {}
}
