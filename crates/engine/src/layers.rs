//! Disk layers as files: names, empty tops, what a layer's header may contain, and layers that
//! become base files.
//!
//! A disk is a chain: one raw bottom, immutable overlays, one writable top. No layer's header names
//! another; the manifest and the records keep the order. A layer that came with a snapshot is
//! untrusted: a qcow2 header can name other files of the host (a backing file, an external data
//! file), so headers are checked before a monitor opens them.

use crate::{
    Common, EngineError, Result,
    fsutil::{link, reflink, remove_file},
    record::Layer,
    users::{chmod_readable, chown_to},
};
use keiki_snapshot::{
    DiskLayer, Format, LAYERS_DIR,
    layer::{HEADER_LEN, check_header},
};
use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Where a machine or snapshot keeps a layer.
pub(crate) fn layer_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(LAYERS_DIR).join(name)
}

/// A new name for a layer, unlike any other.
pub(crate) fn new_name(format: Format) -> String {
    let suffix = match format {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
    };
    format!("{}.{suffix}", uuid::Uuid::now_v7().simple())
}

/// Makes the directory of layers.
pub(crate) fn make_layers_dir(dir: &Path) -> Result<()> {
    let layers = dir.join(LAYERS_DIR);
    fs::create_dir_all(&layers).map_err(EngineError::at("make", &layers))
}

/// Puts the root disk into a machine's directory: by another name, or as a copy where it is on another file system.
pub(crate) fn take_disk(disk: &Path, layer: &Path) -> Result<()> {
    if fs::hard_link(disk, layer).is_ok() {
        return Ok(());
    }
    keiki_sys::sparse::copy(disk, layer).map_err(EngineError::at("make", layer))
}

/// Makes an empty top layer.
pub(crate) fn make_top(common: &Common, disk_mib: u32, path: &Path, user: Option<u32>) -> Result<()> {
    let empty = empty_layer(common, disk_mib)?;
    fs::copy(&empty, path).map_err(EngineError::at("make", path))?;
    chown_to(path, user)
}

/// An empty layer for disks of this size, made once per store.
fn empty_layer(common: &Common, disk_mib: u32) -> Result<PathBuf> {
    let path = common.store.join(format!("empty-{disk_mib}.qcow2"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(&common.store).map_err(EngineError::at("make", &common.store))?;
    let new = common.store.join(format!(".{}", new_name(Format::Qcow2)));
    let output = std::process::Command::new(&common.qemu_img)
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=64k"])
        .arg(&new)
        .arg(format!("{disk_mib}M"))
        .output()
        .map_err(EngineError::at("run", &common.qemu_img))?;
    if !output.status.success() {
        // The error below matters more.
        let _ = fs::remove_file(&new);
        return Err(EngineError::Monitor(format!(
            "tool failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )));
    }
    fs::rename(&new, &path).map_err(EngineError::at("make", &path))?;
    Ok(path)
}

/// Checks the layers of a snapshot against what Keiki would have written. The error names what is
/// wrong.
pub(crate) fn check_layers(
    dir: &Path,
    layers: &[DiskLayer],
    disk_mib: u32,
) -> std::result::Result<(), String> {
    let disk = u64::from(disk_mib) << 20;
    for layer in layers {
        match layer.format {
            Format::Raw if layer.bytes > disk => {
                return Err(format!("disk layer {} exceeds the disk", layer.name));
            }
            Format::Raw => {}
            Format::Qcow2 => check_overlay(dir, &layer.name, disk_mib)?,
        }
    }
    Ok(())
}

/// Checks the header of an overlay. The error names what is wrong.
pub(crate) fn check_overlay(dir: &Path, name: &str, disk_mib: u32) -> std::result::Result<(), String> {
    let mut header = [0; HEADER_LEN];
    File::open(layer_path(dir, name))
        .and_then(|mut file| file.read_exact(&mut header))
        .map_err(|error| format!("disk layer {name} cannot be read ({error})"))?;
    check_header(&header, u64::from(disk_mib) << 20).map_err(|why| format!("disk layer {name} {why}"))
}

/// Gives every lower layer its name in the frozen directory, and measures what the manifest
/// records.
pub(crate) fn link_layers(
    from: &Path,
    dir: &Path,
    layers: &[Layer],
    disk_mib: u32,
) -> Result<Vec<DiskLayer>> {
    make_layers_dir(dir)?;
    let mut listed = Vec::new();
    for layer in layers {
        let (old, new) = (layer_path(from, &layer.name), layer_path(dir, &layer.name));
        adopt_layer(&old, &new)?;
        if layer.format == Format::Qcow2 {
            check_overlay(dir, &layer.name, disk_mib)
                .map_err(|why| EngineError::Monitor(format!("left a bad disk: {why}")))?;
        }
        let bytes = fs::metadata(&new).map_err(EngineError::at("inspect", &new))?.len();
        listed.push(DiskLayer { name: layer.name.clone(), format: layer.format, bytes });
    }
    Ok(listed)
}

/// Gives the layer at `old` the name `new` among base files. A layer that its monitor can still write (no other user
/// may read it) is copied, its blocks are shared, and the copy takes the old one's place too: what the monitor writes
/// through the descriptor it keeps is never read.
fn adopt_layer(old: &Path, new: &Path) -> Result<()> {
    let meta = fs::metadata(old).map_err(EngineError::at("inspect", old))?;
    if meta.mode() & 0o004 != 0 {
        return link(old, new);
    }
    reflink(old, new)?;
    chmod_readable(new)?;
    let beside = old.with_extension("new");
    remove_file(&beside)?;
    link(new, &beside)?;
    fs::rename(&beside, old).map_err(EngineError::at("replace", old))
}
