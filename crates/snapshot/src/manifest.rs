//! The manifest: plain data, one version number for its schema.

use keiki_types::{EngineKind, Shape};
use serde::{Deserialize, Serialize};

/// First words of every manifest: tells a stray JSON file from ours.
pub const KIND: &str = "keiki-snapshot";
/// Version of the schema below. Raised when a field changes its meaning or a reader must know a new one.
pub const VERSION: u32 = 1;
/// Name of the manifest in a snapshot directory.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Name of the RAM file.
pub const MEMORY_FILE: &str = "vm.mem";
/// Name of the device state.
pub const STATE_FILE: &str = "vm.state";
/// Name of the directory of disk layers.
pub const LAYERS_DIR: &str = "layers";

/// What a snapshot directory holds. Field for field the JSON of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`KIND`].
    pub kind: String,
    /// [`VERSION`].
    pub version: u32,
    /// When it was written, RFC 3339 in UTC.
    pub created_at: String,
    /// What made it and can run it.
    pub made_by: Made,
    /// vCPUs, RAM, disk size.
    pub shape: Shape,
    /// RAM.
    pub memory: Memory,
    /// vCPUs and devices.
    pub state: State,
    /// Bottom first; at least one.
    pub layers: Vec<DiskLayer>,
}

/// Who made a snapshot. All three must agree with who opens it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Made {
    /// Engine.
    pub engine: EngineKind,
    /// Version of what ran the machine, as it prints it.
    pub version: String,
    /// Digest of everything on its command line that the guest can see, hex.
    pub machine: String,
}

/// RAM in [`MEMORY_FILE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Exact size of the file; equals the shape's RAM.
    pub bytes: u64,
}

/// Device state in [`STATE_FILE`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Exact size of the file.
    pub bytes: u64,
    /// BLAKE3 of its content, hex.
    pub blake3: String,
}

/// One disk layer in [`LAYERS_DIR`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskLayer {
    /// Plain file name.
    pub name: String,
    /// How it is to be read. Never guessed from the content, which a guest wrote.
    pub format: Format,
    /// Exact size of the file.
    pub bytes: u64,
}

/// Format of a disk layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The disk's bytes. Only the bottom layer.
    Raw,
    /// An overlay.
    Qcow2,
}
