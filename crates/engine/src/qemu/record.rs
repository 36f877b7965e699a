//! What a later process of the node must know to find a machine again: `machine.json`.

use crate::{EngineError, Resources, Result};
use keiki_snapshot::Format;
use keiki_types::Shape;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Version of the schema.
pub(super) const VERSION: u32 = 1;

/// One layer of a machine's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layer {
    pub(super) name: String,
    pub(super) format: Format,
}

/// A machine, as its directory tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) version: u32,
    pub(super) pid: u32,
    /// Tells the process from a later owner of its number.
    pub(super) start_time: u64,
    pub(super) shape: Shape,
    /// Immutable layers, bottom first.
    pub(super) layers: Vec<Layer>,
    /// The writable layer.
    pub(super) top: String,
    /// Block node of the writable layer.
    pub(super) top_node: String,
    /// A top that a freeze was about to switch to.
    pub(super) next_top: Option<String>,
    /// Parked by its user; otherwise whoever finds it parked lets it run.
    pub(super) paused: bool,
    /// A seat: nothing was thawed into it yet.
    pub(super) waiting: bool,
    /// The user its monitor runs as; none: it is not jailed.
    #[serde(default)]
    pub(super) user: Option<u32>,
}

impl Record {
    pub(super) fn path(resources: &Resources) -> PathBuf {
        resources.dir.join("machine.json")
    }

    /// Replaces the record as a whole. Not flushed: a crash of the host ends the machine too.
    pub(super) fn save(&self, resources: &Resources) -> Result<()> {
        let path = Self::path(resources);
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
    pub(super) fn load(resources: &Resources) -> Option<Self> {
        let text = std::fs::read(Self::path(resources)).ok()?;
        serde_json::from_slice::<Self>(&text).ok().filter(|record| record.version == VERSION)
    }
}

/// Removes everything that the engine keeps in a machine's resources.
pub(super) fn clear(resources: &Resources) -> Result<()> {
    let record = Record::path(resources);
    let [log, older] = super::console::files(resources);
    let memory = resources.dir.join(keiki_snapshot::MEMORY_FILE);
    let sockets = super::args::Sockets::of(resources);
    let [state, saved] =
        [keiki_snapshot::STATE_FILE, super::jail::SAVED].map(|name| resources.dir.join(name));
    let files: [&Path; 6] = [&record.with_extension("json.new"), &log, &older, &memory, &state, &saved];
    for file in files.into_iter().chain(sockets.all()) {
        super::process::remove_file(file)?;
    }
    let layers = resources.dir.join(keiki_snapshot::LAYERS_DIR);
    match std::fs::remove_dir_all(&layers) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(EngineError::at("remove", &layers)(error));
        }
        _ => {}
    }
    super::cgroup::remove(resources);
    // Last: while it is there, whoever looks knows that something may be left.
    super::process::remove_file(&record)
}
