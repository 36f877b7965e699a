//! Disk layers as files: names, empty tops, what a layer's header may say, and layers that become base files.
//!
//! A disk is a chain: one raw bottom, immutable overlays, one writable top. No layer's header names another;
//! the order is ours. A layer that came with a snapshot is untrusted: a qcow2 header can name other files of the
//! host (a backing file, an external data file), so headers are checked before a monitor opens them.

use crate::{
    Common, EngineError, Result,
    process::remove_file,
    record::Layer,
    users::{give, show},
};
use keiki_snapshot::{DiskLayer, Format, LAYERS_DIR};
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
    give(path, user)
}

/// An empty layer for disks of this size, made once a store.
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

/// Checks the layers of a snapshot against what we would have written. Says what is wrong.
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

/// Checks the header of an overlay. Says what is wrong.
pub(crate) fn check_overlay(dir: &Path, name: &str, disk_mib: u32) -> std::result::Result<(), String> {
    let mut header = [0; 104];
    File::open(layer_path(dir, name))
        .and_then(|mut file| file.read_exact(&mut header))
        .map_err(|error| format!("disk layer {name} cannot be read ({error})"))?;
    check_header(&header, u64::from(disk_mib) << 20).map_err(|why| format!("disk layer {name} {why}"))
}

/// The fields of a version 3 header that could reach outside the file or change its meaning.
fn check_header(header: &[u8; 104], disk: u64) -> std::result::Result<(), &'static str> {
    let number = |at: usize, len: usize| {
        header.iter().skip(at).take(len).fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let (magic, version, backing, size) = (number(0, 4), number(4, 4), number(8, 8), number(24, 8));
    let backing_len = number(16, 4);
    let (cluster_bits, encryption, snapshots, incompatible) =
        (number(20, 4), number(32, 4), number(60, 4), number(72, 8));
    match () {
        () if magic != 0x5146_49fb || version != 3 => Err("is not qcow2 version 3"),
        // QEMU leaves an offset with no length behind when it takes a name away.
        () if backing != 0 && backing_len != 0 => Err("names a backing file"),
        () if encryption != 0 => Err("is encrypted"),
        // Bit 0 says it was not closed: the case for every layer of a running machine's ancestor.
        // Automatically cleared ones are bitmaps, and a name of an external file under a bit of its own.
        () if incompatible & !1 != 0 || number(88, 8) != 0 => {
            Err("needs features that our layers do not have")
        }
        () if snapshots != 0 => Err("has internal snapshots"),
        () if cluster_bits != 16 => Err("has clusters of another size than 64 KiB"),
        () if size != disk => Err("is for a disk of another size"),
        () => Ok(()),
    }
}

/// Gives every lower layer its name in the frozen directory, and measures what the manifest tells.
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
        let bytes = fs::metadata(&new).map_err(EngineError::at("look at", &new))?.len();
        listed.push(DiskLayer { name: layer.name.clone(), format: layer.format, bytes });
    }
    Ok(listed)
}

/// Gives the layer at `old` the name `new` among base files. What a monitor can write still (nobody else may read it)
/// is copied, its blocks are shared, and the copy takes the old one's place too: the monitor may keep its descriptor,
/// nobody will read what it writes there.
fn adopt_layer(old: &Path, new: &Path) -> Result<()> {
    let meta = fs::metadata(old).map_err(EngineError::at("look at", old))?;
    if meta.mode() & 0o004 != 0 {
        return fs::hard_link(old, new).map_err(EngineError::at("link", new));
    }
    let from = File::open(old).map_err(EngineError::at("open", old))?;
    let to = File::options().write(true).create_new(true).open(new).map_err(EngineError::at("make", new))?;
    keiki_sys::files::reflink(&from, &to).map_err(EngineError::at("fill", new))?;
    show(new)?;
    let beside = old.with_extension("new");
    remove_file(&beside)?;
    fs::hard_link(new, &beside).map_err(EngineError::at("link", &beside))?;
    fs::rename(&beside, old).map_err(EngineError::at("replace", old))
}

#[cfg(test)]
mod tests {
    use super::check_header;

    fn good() -> [u8; 104] {
        let mut header = [0; 104];
        header[..8].copy_from_slice(&[0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 3]);
        header[20..24].copy_from_slice(&16_u32.to_be_bytes());
        header[24..32].copy_from_slice(&(64_u64 << 20).to_be_bytes());
        header
    }

    #[test]
    fn a_header_that_reaches_outside_is_refused() {
        let (disk, mut bad_name) = (64 << 20, good());
        assert_eq!(check_header(&good(), disk), Ok(()));
        assert!(check_header(&good(), disk + 1).is_err());
        bad_name[15] = 104;
        assert_eq!(check_header(&bad_name, disk), Ok(()));
        bad_name[19] = 9;
        assert!(check_header(&bad_name, disk).is_err());
        for (at, value) in
            [(0, 1), (7, 2), (23, 9), (35, 1), (63, 1), (79, 4), (79, 8), (72, 1), (95, 1), (95, 2)]
        {
            let mut bad = good();
            bad[at] = value;
            assert!(check_header(&bad, disk).is_err(), "byte {at}");
        }
    }
}
