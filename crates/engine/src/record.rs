//! What a later process of the node must know to find a machine again: `machine.json`.

use crate::{EngineError, Result, VmPaths, process::remove_file};
use keiki_snapshot::Format;
use keiki_types::Shape;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tokio::sync::Mutex;

/// Version of the schema.
pub(crate) const VERSION: u32 = 1;

/// Sockets in [`VmPaths::run_dir`]: the control socket of `keiki-vmm`.
pub(crate) const CONTROL: &str = "control.sock";
/// QEMU's.
pub(crate) const QMP: &str = "qmp.sock";
/// The agent port.
pub(crate) const AGENT: &str = "agent.sock";
/// The serial console, where the monitor does not log it by itself.
pub(crate) const CONSOLE: &str = "console.sock";
/// Where QEMU writes its device state to, in [`VmPaths::dir`].
pub(crate) const SAVED: &str = "device.state";

/// One layer of a machine's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    pub(crate) name: String,
    pub(crate) format: Format,
}

/// A machine, as its directory tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) version: u32,
    pub(crate) pid: u32,
    /// Tells the process from a later owner of its number.
    pub(crate) start_time: u64,
    pub(crate) shape: Shape,
    /// Immutable layers, bottom first.
    pub(crate) layers: Vec<Layer>,
    /// The writable layer.
    pub(crate) top: String,
    /// QEMU's block node of the writable layer.
    #[serde(default)]
    pub(crate) top_node: String,
    /// A top that a freeze was about to switch to.
    pub(crate) next_top: Option<String>,
    /// It was told to read other layers than these, with the same contents; whether it does is not known.
    #[serde(default)]
    pub(crate) unsure: bool,
    /// Parked by its user; otherwise whoever finds it parked lets it run.
    pub(crate) paused: bool,
    /// A prepared VM: nothing was thawed into it yet.
    pub(crate) waiting: bool,
    /// The user its monitor runs as; none: it is not jailed.
    #[serde(default)]
    pub(crate) user: Option<u32>,
}

impl Record {
    pub(crate) fn path(paths: &VmPaths) -> PathBuf {
        paths.dir.join("machine.json")
    }

    /// Replaces the record as a whole. Not flushed: a crash of the host ends the machine too.
    pub(crate) fn save(&self, paths: &VmPaths) -> Result<()> {
        let path = Self::path(paths);
        let new = path.with_extension("json.new");
        let text = serde_json::to_vec(self)
            .map_err(std::io::Error::from)
            .map_err(EngineError::at("write", &path))?;
        std::fs::write(&new, text).map_err(EngineError::at("write", &new))?;
        std::fs::rename(&new, &path).map_err(EngineError::at("write", &path))?;
        keiki_sys::failpoint::reach("machine.json");
        Ok(())
    }

    /// None if there is none that can be read: then there is no machine.
    pub(crate) fn load(paths: &VmPaths) -> Option<Self> {
        let text = std::fs::read(Self::path(paths)).ok()?;
        serde_json::from_slice::<Self>(&text).ok().filter(|record| record.version == VERSION)
    }
}

/// Parks a machine, or lets it run, by `order`. The wish is recorded first: whoever finds the machine after a crash
/// fulfils it.
pub(crate) async fn set_paused(
    record: &Mutex<Record>,
    paths: &VmPaths,
    paused: bool,
    order: impl Future<Output = Result<()>>,
) -> Result<()> {
    let mut record = record.lock().await;
    let before = std::mem::replace(&mut record.paused, paused);
    record.save(paths)?;
    let done = order.await;
    if done.is_err() {
        record.paused = before;
        record.save(paths)?;
    }
    done
}

/// Removes everything that the engine keeps in a machine's paths.
pub(crate) fn clear(paths: &VmPaths) -> Result<()> {
    let record = Record::path(paths);
    let [log, older] = crate::console::files(paths);
    let memory = paths.dir.join(keiki_snapshot::MEMORY_FILE);
    let [state, saved] = [keiki_snapshot::STATE_FILE, SAVED].map(|name| paths.dir.join(name));
    let files: [&Path; 6] = [&record.with_extension("json.new"), &log, &older, &memory, &state, &saved];
    for file in files {
        remove_file(file)?;
    }
    for socket in [CONTROL, QMP, AGENT, CONSOLE] {
        remove_file(&paths.run_dir.join(socket))?;
    }
    let layers = paths.dir.join(keiki_snapshot::LAYERS_DIR);
    match std::fs::remove_dir_all(&layers) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(EngineError::at("remove", &layers)(error));
        }
        _ => {}
    }
    crate::cgroup::remove(paths);
    // Last: while it is there, whoever looks knows that something may be left.
    remove_file(&record)
}
