//! A frozen machine as files. Independent of the engines.
//!
//! ```text
//! <dir>/manifest.json   what the rest is; written last: without it the directory is not a snapshot
//! <dir>/vm.mem          guest RAM, as large as the guest believes it is, sparse, sharing blocks with relatives
//! <dir>/vm.state        vCPUs and devices, opaque to us, digest in the manifest
//! <dir>/layers/<name>   disk layers, immutable, each a hard link
//! ```
//!
//! No file holds a path. The manifest lists the disk layers, bottom first: the first is raw, the
//! others are qcow2 without a backing name in their header.
//!
//! A snapshot directory is untrusted: it may be damaged, of another version, or crafted to be
//! loaded. [`open`] checks everything that is cheap to check before anything is trusted: text size,
//! schema, version, names that are plain, files that are regular and no symlinks, exact sizes,
//! bounds, and the digest of the device state. RAM is not hashed (that would take a second per GiB
//! on every restore); only its size is checked.

pub mod layer;
mod manifest;
mod open;

pub use manifest::{
    DiskLayer, Format, KIND, LAYERS_DIR, MANIFEST_FILE, MEMORY_FILE, Made, Manifest, Memory, STATE_FILE,
    State, VERSION,
};
pub use open::{MAX_STATE, SnapshotError, check_layer_name, open, write_manifest};
