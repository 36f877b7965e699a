//! The engine on our own monitor: freeze and thaw are fork(2) (RFD 006).
//!
//! ```text
//!   paths.dir/vm.mem          hard link of the memory image under it, never written
//!   paths.dir/layers/*        hard links of its disk's lower layers, and its own top
//!   paths.dir/machine.json    how to find it again
//!   paths.dir/console.log     what its guest said, written by the monitor
//!   paths.run_dir/*.sock      control, agent
//! ```
//!
//! - `monitor`, `control`: a `keiki-vmm` process, and what is said to it
//! - `lineage`: who shares a user and a memory limit
//! - `fds`: what one copy owns, opened
//! - `machine`, `freeze`: a machine that runs, and how it is frozen
//! - `chain`: disk chains kept short
//! - `frozen`, `resident`: zygotes: forked ones, and those of stored machines
//! - `working_set`: what a first run touches, read ahead by who loads the files later
//! - `adopt`: machines found again
//! - `probe`: whether KVM here is worth using

mod adopt;
mod chain;
mod control;
mod fds;
mod freeze;
mod frozen;
mod lineage;
mod machine;
mod memory;
mod monitor;
mod probe;
mod resident;
mod working_set;

pub(crate) use fds::VmFds;
pub use probe::is_native;

use crate::{
    BootSpec, Capabilities, Common, Engine, EngineError, Frozen, Image, Machine, PreparedVm, Result,
    SharingScope, VmPaths,
    files::refusal,
    layers::check_layers,
    prepared::Waiting,
    process::blocking,
    record,
    steps::Stopwatch,
    users::{Users, hide},
};
use async_trait::async_trait;
use frozen::KvmFrozen;
use keiki_control::Step;
use keiki_snapshot::Made;
use keiki_types::{EngineKind, Shape};
use lineage::Lineages;
use resident::{Files, Residents};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// What a snapshot can be thawed by: raised when the devices of a machine or their places change.
const MACHINE: &str = "1";
/// Steps that a monitor may tell of one operation.
const STEPS: usize = 24;

/// What the engine is told.
#[derive(Debug, Clone)]
pub struct KvmConfig {
    /// `keiki-vmm`.
    pub binary: PathBuf,
    /// Take KVM also where it is slow.
    pub forced: bool,
    /// What every engine is told.
    pub common: Common,
}

/// The engine.
pub struct Kvm {
    host: Arc<Host>,
}

/// What all machines of the engine share.
struct Host {
    config: KvmConfig,
    users: Users,
    lineages: Lineages,
    residents: Residents,
    tsc_khz: tokio::sync::OnceCell<Option<u64>>,
    tidying: std::sync::Once,
}

impl Kvm {
    /// Does nothing yet: see [`Engine::probe`].
    #[must_use]
    pub fn new(config: KvmConfig) -> Self {
        let (users, lineages, residents, tsc_khz) = Default::default();
        let tidying = std::sync::Once::new();
        Self { host: Arc::new(Host { config, users, lineages, residents, tsc_khz, tidying }) }
    }
}

impl Host {
    async fn tsc_khz(&self) -> Option<u64> {
        let measure = || async { blocking(|| Ok(keiki_sys::tsc::tsc_khz())).await.unwrap_or_default() };
        *self.tsc_khz.get_or_init(measure).await
    }
}

/// What a snapshot made here says of its maker.
fn made(shape: Shape) -> Made {
    let machine = format!("keiki-vmm {MACHINE} {} vCPUs {} MiB", shape.vcpus, shape.memory_mib);
    let machine = blake3::hash(machine.as_bytes()).to_hex().to_string();
    Made { engine: EngineKind::Kvm, version: MACHINE.into(), machine }
}

/// Adds the steps that a monitor tells, which is not to be believed: few, with short plain names.
fn note(watch: &mut Stopwatch, steps: &[Step]) {
    for step in steps.iter().take(STEPS) {
        let name: String =
            step.name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(24).collect();
        watch.told(format!("vmm_{name}"), Duration::from_nanos(step.ns));
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
        Ok(Box::new(machine::boot(&self.host, spec, paths).await?))
    }

    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> {
        if self.host.config.common.first_user.is_some() {
            hide(dir)?;
        }
        Ok(Image { dir: dir.to_owned(), shape, alone: false })
    }

    async fn prepare(&self, image: &Image, paths: VmPaths) -> Result<PreparedVm> {
        let (host, at, disk_mib) = (Arc::clone(&self.host), paths.clone(), image.shape.disk_mib);
        match blocking(move || VmFds::prepare(&host, &at, disk_mib)).await {
            Ok(fds) => Ok(PreparedVm::new(image, paths, Waiting::Kvm(fds))),
            Err(error) => {
                blocking(move || record::clear(&paths)).await?;
                Err(error)
            }
        }
    }

    async fn load(&self, dir: &Path, scope: SharingScope) -> Result<Arc<dyn Frozen>> {
        let path = dir.to_owned();
        let (manifest, files) = blocking(move || {
            let manifest = keiki_snapshot::open(&path).map_err(|error| refusal(&path, error))?;
            check_layers(&path, &manifest.layers, manifest.shape.disk_mib)
                .map_err(|why| EngineError::Refused { dir: path.clone(), why })?;
            manifest_fits(&path, &manifest.made_by, &made(manifest.shape))?;
            let files = Files::open(&path, &manifest)?;
            Ok((manifest, files))
        })
        .await?;
        let host = Arc::clone(&self.host);
        self.host.tidying.call_once(move || drop(tokio::spawn(resident::keep_tidy(Arc::downgrade(&host)))));
        let files = Arc::new(files);
        // The state is looked at now, by who will use it: a snapshot that cannot be thawed here is refused here.
        self.host.residents.get(&self.host, &files, &scope).await?;
        Ok(Arc::new(KvmFrozen::stored(&self.host, dir, manifest, files, scope)))
    }

    async fn forget(&self, dir: &Path) {
        self.host.residents.forget(dir).await;
    }

    async fn adopt(&self, paths: &VmPaths) -> Result<Option<Box<dyn Machine>>> {
        Ok(adopt::adopt(&self.host, paths).await?.map(|machine| Box::new(machine) as Box<dyn Machine>))
    }

    fn adoption_finished(&self) {
        self.host.lineages.all_found();
    }

    async fn close(&self) {
        self.host.residents.close().await;
    }
}

fn manifest_fits(dir: &Path, made: &Made, here: &Made) -> Result<()> {
    let why = match () {
        () if made.engine != here.engine => {
            format!("it was made by engine {}, this is {}", made.engine, here.engine)
        }
        () if made.version != here.version => {
            format!("its machine is of version {}, this is {}", made.version, here.version)
        }
        () if made.machine != here.machine => "its machine has other devices than this program's".into(),
        () => return Ok(()),
    };
    Err(EngineError::Refused { dir: dir.to_owned(), why })
}
