//! What all machines of the engine share.

use super::{lineage::Lineages, resident::Residents};
use crate::Common;
use keiki_snapshot::Made;
use keiki_types::{EngineKind, Shape};
use std::{path::PathBuf, sync::Arc};

/// What a snapshot can be thawed by: raised when the devices of a machine or their places change.
const MACHINE: &str = "1";

/// Settings of the engine.
#[derive(Debug, Clone)]
pub struct KvmConfig {
    /// `keiki-vmm`.
    pub binary: PathBuf,
    /// Use KVM even where it is slow.
    pub forced: bool,
    /// Settings of every engine.
    pub common: Common,
}

/// What all machines of the engine share.
pub(super) struct Host {
    pub(super) config: KvmConfig,
    pub(super) lineages: Arc<Lineages>,
    pub(super) residents: Arc<Residents>,
}

impl Host {
    pub(super) fn new(config: KvmConfig) -> Self {
        let lineages = Arc::new(Lineages::new(&config.common));
        let residents = Arc::new(Residents::new(&config.binary, &config.common.store, &lineages));
        Self { config, lineages, residents }
    }
}

/// What a snapshot made here records about its engine.
pub(super) fn made(shape: Shape) -> Made {
    let machine = format!("keiki-vmm {MACHINE} {} vCPUs {} MiB", shape.vcpus, shape.memory_mib);
    let machine = blake3::hash(machine.as_bytes()).to_hex().to_string();
    Made { engine: EngineKind::Kvm, version: MACHINE.into(), machine }
}
