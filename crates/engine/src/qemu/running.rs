//! A machine that runs: its monitor, and how its console is logged.

use super::{args::Sockets, host::Host, monitor::Monitor};
use crate::{EngineError, Result, VmPaths, console, machine::Vm, process::Task, record};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

pub(super) type QemuVm = Vm<QemuBackend>;
pub(super) type Record = record::Record<QemuPart>;

/// The engine's part of a record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QemuPart {
    /// Block node of the writable layer.
    #[serde(default)]
    pub(crate) top_node: String,
}

/// The engine's part of a machine that runs.
pub(super) struct QemuBackend {
    pub(super) monitor: Monitor,
    pub(super) console: Task,
}

/// Makes the machine of its parts. On error the monitor comes back, to be ended.
pub(super) async fn assemble(
    host: &Arc<Host>,
    monitor: Monitor,
    paths: &VmPaths,
    record: Record,
) -> Result<Arc<QemuVm>, (Monitor, EngineError)> {
    let console = match console::pump(&Sockets::of(paths).console, paths).await {
        Ok(console) => console,
        Err(error) => return Err((monitor, error)),
    };
    let backend = QemuBackend { monitor, console };
    Vm::new(host, paths, record, backend).map_err(|(backend, error)| (backend.monitor, error))
}
