//! A frozen machine as files. Knows no engine.
//!
//! ```text
//! <dir>/manifest.json   what the rest is; written last: without it the directory is not a snapshot
//! <dir>/vm.mem          guest RAM, as large as the guest believes it is, sparse, sharing blocks with relatives
//! <dir>/vm.state        vCPUs and devices, opaque to us, digest in the manifest
//! <dir>/layers/<name>   disk layers, immutable, each a hard link
//! ```
//!
//! No file holds a path. The order of the disk layers is the manifest's, bottom first: the first is
//! raw, the others are qcow2 without a backing name in their header.
//!
//! A snapshot directory is untrusted: it may be damaged, of another version, or crafted to be
//! loaded. [`open`] checks everything that is cheap, before anything is believed: text size,
//! schema, version, names that are plain, files that are regular and no symlinks, exact sizes,
//! bounds, and the digest of the device state. RAM is not hashed (a second a GiB on every restore);
//! its size is.

pub mod layer;
mod manifest;
mod open;

pub use manifest::{
    DiskLayer, Format, KIND, LAYERS_DIR, MANIFEST_FILE, MEMORY_FILE, Made, Manifest, Memory, STATE_FILE,
    State, VERSION,
};
pub use open::{MAX_STATE, SnapshotError, check_layer_name, open, write_manifest};
