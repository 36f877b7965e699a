//! The engine on our own monitor: freeze and thaw are fork(2) (RFD 006).
//!
//! ```text
//!   paths.dir/vm.mem          hard link of the memory image under it, never written
//!   paths.dir/layers/*        hard links of its disk's lower layers, and its own top
//!   paths.dir/machine.json    how to find it again
//!   paths.dir/console.log     what its guest wrote to the console, by the monitor
//!   paths.run_dir/*.sock      control, agent
//! ```
//!
//! - `host`: what all machines share
//! - `monitor`, `control`: a `keiki-vmm` process, and its control socket
//! - `lineage`: relatives, which share a user and a memory limit
//! - `fds`: the open descriptors of one copy
//! - `boot`, `running`, `backend`: a machine from its first boot on
//! - `freeze`, `frozen`: how a machine is frozen, and what it becomes
//! - `chain`: disk chains kept short
//! - `stored`, `resident`: stored machines, and the zygotes loaded from them
//! - `working_set`: what a first run touches, read ahead for later ones
//! - `probe`: whether KVM here is worth using

mod backend;
mod boot;
mod chain;
mod control;
pub(crate) mod fds;
mod freeze;
mod frozen;
mod host;
mod lineage;
mod monitor;
mod probe;
mod resident;
mod running;
mod stored;
mod working_set;

pub use host::KvmConfig;
pub use probe::is_native;
#[cfg(test)]
pub(crate) use running::KvmPart;

use crate::{
    BootSpec, Capabilities, Engine, Frozen, Image, Machine, PreparedVm, Result, VmPaths,
    files::open_snapshot, machine, prepared::Waiting, process::blocking, record::or_clear,
    users::chmod_private,
};
use async_trait::async_trait;
use fds::VmFds;
use frozen::KvmFrozen;
use host::{Host, made};
use keiki_types::{EngineKind, Shape, Sharing};
use running::KvmBackend;
use std::{path::Path, sync::Arc};
use stored::StoredFiles;

/// The engine.
pub struct Kvm {
    host: Arc<Host>,
}

impl Kvm {
    /// Does nothing yet: see [`Engine::probe`].
    #[must_use]
    pub fn new(config: KvmConfig) -> Self {
        Self { host: Arc::new(Host::new(config)) }
    }
}

#[async_trait]
impl Engine for Kvm {
    fn kind(&self) -> EngineKind {
        EngineKind::Kvm
    }

    async fn probe(&self) -> Capabilities {
        probe::probe(&self.host).await
    }

    async fn boot(&self, spec: &BootSpec, paths: VmPaths) -> Result<Box<dyn Machine>> {
        Ok(Box::new(or_clear(&paths, boot::boot(&self.host, spec, &paths)).await?))
    }

    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> {
        if self.host.config.common.first_user.is_some() {
            chmod_private(dir)?;
        }
        Ok(Image { dir: dir.to_owned(), shape, alone: false })
    }

    async fn prepare(&self, image: &Image, paths: VmPaths) -> Result<PreparedVm> {
        let (host, at, disk_mib) = (Arc::clone(&self.host), paths.clone(), image.shape.disk_mib);
        let fds = blocking(move || VmFds::prepare(&host.config.common, &at, disk_mib));
        let fds = or_clear(&paths, fds).await?;
        Ok(PreparedVm::new(image, paths, Waiting::Kvm(fds)))
    }

    async fn load(&self, dir: &Path, sharing: Sharing) -> Result<Arc<dyn Frozen>> {
        let path = dir.to_owned();
        let (manifest, files) = blocking(move || {
            let manifest = open_snapshot(&path, made)?;
            let files = StoredFiles::open(&path, &manifest)?;
            Ok((manifest, Arc::new(files)))
        })
        .await?;
        self.host.residents.keep_checked();
        // Loaded now, so that a state which cannot be thawed here is refused here.
        self.host.residents.get(&files, sharing).await?;
        Ok(Arc::new(KvmFrozen::stored(&self.host, dir, manifest, files, sharing)))
    }

    async fn forget(&self, dir: &Path) {
        self.host.residents.forget(dir).await;
    }

    async fn adopt(&self, paths: &VmPaths) -> Result<Option<Box<dyn Machine>>> {
        machine::adopt::<KvmBackend>(&self.host, paths).await
    }

    fn adoption_finished(&self) {
        self.host.lineages.adoption_finished();
    }

    async fn close(&self) {
        self.host.residents.close().await;
    }
}
