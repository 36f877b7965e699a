//! Disk layers: block nodes, empty tops, and what a layer's header may say.
//!
//! A disk is a chain: one raw bottom, immutable overlays, one writable top. No layer's header names another;
//! the order is ours, given to QEMU node by node. A layer that came with a snapshot is untrusted: a qcow2
//! header can name other files of the host (a backing file, an external data file), so headers are checked
//! before QEMU opens them.

use super::{Host, jail};
use crate::{EngineError, Result};
use keiki_snapshot::{
    DiskLayer, Format, LAYERS_DIR,
    layer::{HEADER_LEN, check_header},
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

/// Where a machine or snapshot keeps a layer.
pub(super) fn layer_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(LAYERS_DIR).join(name)
}

/// A new name for a layer, unlike any other.
pub(super) fn new_name(format: Format) -> String {
    let suffix = match format {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
    };
    format!("{}.{suffix}", uuid::Uuid::now_v7().simple())
}

/// The raw bottom.
pub(super) fn raw_node(node: &str, path: &Path) -> Value {
    json!({"driver": "raw", "node-name": node, "read-only": true, "discard": "unmap",
        "file": {"driver": "file", "filename": path, "read-only": true, "locking": "off"}})
}

/// An immutable overlay.
pub(super) fn overlay_node(node: &str, path: &Path, backing: &str) -> Value {
    json!({"driver": "qcow2", "node-name": node, "read-only": true, "backing": backing,
        "file": {"driver": "file", "filename": path, "read-only": true, "locking": "off"}})
}

/// The writable top. Its file is locked by nobody: once it is a lower layer, the monitors of relatives open
/// it while this one still holds it.
pub(super) fn top_node(node: &str, path: &Path, backing: Option<&str>) -> Value {
    json!({"driver": "qcow2", "node-name": node, "backing": backing, "discard": "unmap",
        "file": {"driver": "file", "filename": path, "locking": "off", "discard": "unmap"}})
}

/// Makes an empty top layer.
pub(super) fn make_top(host: &Host, disk_mib: u32, path: &Path, user: Option<u32>) -> Result<()> {
    let empty = empty_layer(host, disk_mib)?;
    fs::copy(&empty, path).map_err(EngineError::at("make", path))?;
    jail::give(path, user)
}

/// An empty layer for disks of this size, made once a store.
fn empty_layer(host: &Host, disk_mib: u32) -> Result<PathBuf> {
    let path = host.config.store.join(format!("empty-{disk_mib}.qcow2"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(&host.config.store).map_err(EngineError::at("make", &host.config.store))?;
    let new = host.config.store.join(format!(".{}", new_name(Format::Qcow2)));
    let output = std::process::Command::new(&host.config.qemu_img)
        .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=64k"])
        .arg(&new)
        .arg(format!("{disk_mib}M"))
        .output()
        .map_err(EngineError::at("run", &host.config.qemu_img))?;
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

/// Checks the layers of a snapshot against what we would have written. Says what is wrong.
pub(super) fn check_layers(
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

/// Checks the header of an overlay. Says what is wrong.
pub(super) fn check_overlay(dir: &Path, name: &str, disk_mib: u32) -> std::result::Result<(), String> {
    let mut header = [0; HEADER_LEN];
    File::open(layer_path(dir, name))
        .and_then(|mut file| file.read_exact(&mut header))
        .map_err(|error| format!("disk layer {name} cannot be read ({error})"))?;
    check_header(&header, u64::from(disk_mib) << 20).map_err(|why| format!("disk layer {name} {why}"))
}
