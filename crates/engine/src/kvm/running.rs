//! A machine that runs: its monitor, and what its record contains about its disk.

use super::{fds::open_layers, host::Host, monitor::Monitor, working_set::FirstRun};
use crate::{
    Result, VmPaths, fsutil::remove_file, layers::layer_path, machine::Vm, process::blocking, record,
};
use keiki_control::Request;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, atomic::AtomicBool};

pub(super) type KvmVm = Vm<KvmBackend>;
pub(super) type Record = record::Record<KvmPart>;

/// The engine's part of a record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvmPart {
    /// The machine was asked to switch to layers other than the recorded ones, with the same
    /// contents. Whether it did is not known.
    #[serde(default)]
    pub(crate) unsure: bool,
}

/// The engine's part of a machine that runs.
pub(super) struct KvmBackend {
    pub(super) monitor: Monitor,
    pub(super) shortening: Shortening,
    pub(super) first_run: Mutex<Option<FirstRun>>,
}

/// Work on a machine's disk chain: one at a time.
#[derive(Default)]
pub(super) struct Shortening {
    pub(super) permit: Arc<tokio::sync::Mutex<()>>,
    /// The machine has ended: stop.
    pub(super) stopped: Arc<AtomicBool>,
}

/// Makes the machine of a monitor that answers. On error its process is ended.
pub(super) async fn assemble(
    host: &Arc<Host>,
    monitor: Monitor,
    paths: &VmPaths,
    record: Record,
) -> Result<Arc<KvmVm>> {
    let backend = KvmBackend { monitor, shortening: Shortening::default(), first_run: Mutex::default() };
    match Vm::new(host, paths, record, backend) {
        Ok(vm) => Ok(vm),
        Err((backend, error)) => Err(backend.monitor.give_up(error).await),
    }
}

/// Finds out whether a freeze that failed had switched the disk, and updates the record. The number
/// of layers shows it, so machine and record must agree on the others first.
pub(super) async fn reconcile(vm: &KvmVm, record: &mut Record) {
    if let Err(error) = reconcile_layers(vm, record).await {
        return tracing::debug!(%error, "the layers of a disk are not known");
    }
    if record.next_top.is_none() {
        return;
    }
    match vm.backend.monitor.control.hello().await {
        Ok((hello, _)) if hello.layers as usize > record.layers.len() => record.promote(),
        Ok(_) => {
            let next = record.next_top.take().unwrap_or_default();
            // A file that stays is removed with the machine.
            if let Err(error) = remove_file(&layer_path(&vm.paths.dir, &next)) {
                tracing::debug!(%error, "after a failed freeze");
            }
        }
        // The next freeze asks again, or the machine has ended.
        Err(error) => tracing::debug!(%error, "after a failed freeze"),
    }
    if let Err(error) = record.save(&vm.paths) {
        tracing::warn!(%error, "after a failed freeze");
    }
}

/// Makes the machine read the layers of its record, if it may have switched to others.
pub(super) async fn reconcile_layers(vm: &KvmVm, record: &mut Record) -> Result<()> {
    if !record.engine.unsure {
        return Ok(());
    }
    let (dir, layers) = (vm.paths.dir.clone(), record.layers.clone());
    let files = blocking(move || open_layers(&dir, &layers)).await?;
    vm.backend.monitor.control.order(Request::Layers, files).await?;
    record.engine.unsure = false;
    record.save(&vm.paths)
}
