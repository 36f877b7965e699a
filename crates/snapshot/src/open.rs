//! Reading and writing snapshot directories.

use crate::manifest::{
    DiskLayer, Format, KIND, LAYERS_DIR, MANIFEST_FILE, MEMORY_FILE, Manifest, STATE_FILE, VERSION,
};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

/// Larger manifests are refused unread.
const MAX_MANIFEST: u64 = 64 * 1024;
/// Larger device states are refused unread: QEMU's are some 20 KiB, a vCPU adds a few.
pub const MAX_STATE: u64 = 16 * 1024 * 1024;
/// Longer chains are refused; engines keep theirs far shorter.
const MAX_LAYERS: usize = 64;
/// 1 TiB: larger RAM or disks are refused.
const MAX_MIB: u32 = 1024 * 1024;

/// Why a snapshot directory cannot be used or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// It is not what it should be. One clause.
    #[error("{0}")]
    Refused(String),
    /// A file could not be read or written.
    #[error("cannot use {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn refuse<T>(why: impl Into<String>) -> Result<T, SnapshotError> {
    Err(SnapshotError::Refused(why.into()))
}

/// Opens a snapshot directory and checks it against its manifest.
///
/// # Errors
/// [`SnapshotError::Refused`] with what is wrong.
pub fn open(dir: &Path) -> Result<Manifest, SnapshotError> {
    let text = read(dir, MANIFEST_FILE, MAX_MANIFEST)?;
    let manifest = parse(&text)?;
    check(&manifest)?;
    exact_size(dir, MEMORY_FILE, manifest.memory.bytes)?;
    let state = read(dir, STATE_FILE, MAX_STATE)?;
    if state.len() as u64 != manifest.state.bytes {
        return refuse(format!(
            "{STATE_FILE} has {} bytes, the manifest says {}",
            state.len(),
            manifest.state.bytes
        ));
    }
    if blake3::hash(&state).to_hex().as_str() != manifest.state.blake3 {
        return refuse(format!("{STATE_FILE} is damaged: its digest is not the manifest's"));
    }
    directory(dir, LAYERS_DIR)?;
    for layer in &manifest.layers {
        exact_size(dir, &format!("{LAYERS_DIR}/{}", layer.name), layer.bytes)?;
    }
    Ok(manifest)
}

/// Writes the manifest so that a crash leaves the old state or the new one: new file, flush,
/// rename, flush of the directory. Everything else in the directory must have been flushed before.
///
/// # Errors
/// [`SnapshotError::Io`].
pub fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<(), SnapshotError> {
    check(manifest)?;
    let (new, path) = (dir.join(".manifest.new"), dir.join(MANIFEST_FILE));
    let write = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec_pretty(manifest)?)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        keiki_sys::files::sync_dir(dir)
    };
    write().map_err(|source| {
        // Best effort: the error that matters is the one above.
        let _ = fs::remove_file(&new);
        SnapshotError::Io { path: path.clone(), source }
    })
}

/// Version first: a manifest of another version need not fit this schema.
fn parse(text: &[u8]) -> Result<Manifest, SnapshotError> {
    let value: serde_json::Value = match serde_json::from_slice(text) {
        Ok(value) => value,
        Err(error) => return refuse(format!("{MANIFEST_FILE} is not JSON ({error})")),
    };
    if value.get("kind").and_then(|kind| kind.as_str()) != Some(KIND) {
        return refuse(format!("{MANIFEST_FILE} does not start with kind {KIND:?}"));
    }
    match value.get("version").and_then(serde_json::Value::as_u64) {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => return refuse(format!("its version is {version}, this program reads {VERSION}")),
        None => return refuse(format!("{MANIFEST_FILE} has no version number")),
    }
    serde_json::from_value(value)
        .or_else(|error| refuse(format!("{MANIFEST_FILE} does not fit its schema ({error})")))
}

/// What can be checked without looking at the other files.
fn check(manifest: &Manifest) -> Result<(), SnapshotError> {
    let shape = manifest.shape;
    if shape.vcpus == 0
        || !(1..=MAX_MIB).contains(&shape.memory_mib)
        || !(1..=MAX_MIB).contains(&shape.disk_mib)
    {
        return refuse("its shape is out of bounds");
    }
    if manifest.memory.bytes != u64::from(shape.memory_mib) << 20 {
        return refuse(format!(
            "its memory is {} bytes, its shape {} MiB",
            manifest.memory.bytes, shape.memory_mib
        ));
    }
    if manifest.state.bytes > MAX_STATE {
        return refuse(format!("its device state is larger than {MAX_STATE} bytes"));
    }
    if manifest.layers.is_empty() || manifest.layers.len() > MAX_LAYERS {
        return refuse(format!(
            "it has {} disk layers; 1 to {MAX_LAYERS} are allowed",
            manifest.layers.len()
        ));
    }
    let mut names = BTreeSet::new();
    for (index, layer) in manifest.layers.iter().enumerate() {
        check_layer(index, layer)?;
        if !names.insert(&layer.name) {
            return refuse(format!("disk layer {} is named twice", layer.name));
        }
    }
    Ok(())
}

fn check_layer(index: usize, layer: &DiskLayer) -> Result<(), SnapshotError> {
    check_layer_name(&layer.name)?;
    if (layer.format == Format::Raw) != (index == 0) {
        return refuse("its bottom disk layer must be raw, and no other");
    }
    if layer.bytes > u64::from(MAX_MIB) << 21 {
        return refuse(format!("disk layer {} is larger than the largest disk", layer.name));
    }
    Ok(())
}

/// A layer's name must be a plain file name: a few safe characters, no separator, no leading dot.
///
/// # Errors
/// [`SnapshotError::Refused`].
pub fn check_layer_name(name: &str) -> Result<(), SnapshotError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if (1..=100).contains(&name.len()) && !name.starts_with('.') && name.chars().all(plain) {
        return Ok(());
    }
    refuse(format!(
        "disk layer name {:?} is not a plain file name",
        name.chars().take(100).collect::<String>()
    ))
}

/// A regular file, not a link to one: what a link names may be anything of the host.
fn regular(dir: &Path, name: &str) -> Result<u64, SnapshotError> {
    match fs::symlink_metadata(dir.join(name)) {
        Ok(meta) if meta.file_type().is_symlink() => refuse(format!("{name} is a symbolic link")),
        Ok(meta) if !meta.is_file() => refuse(format!("{name} is not a file")),
        Ok(meta) => Ok(meta.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => refuse(format!("{name} is missing")),
        Err(source) => Err(SnapshotError::Io { path: dir.join(name), source }),
    }
}

fn directory(dir: &Path, name: &str) -> Result<(), SnapshotError> {
    match fs::symlink_metadata(dir.join(name)) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => refuse(format!("{name} is not a directory")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => refuse(format!("{name} is missing")),
        Err(source) => Err(SnapshotError::Io { path: dir.join(name), source }),
    }
}

fn exact_size(dir: &Path, name: &str, want: u64) -> Result<(), SnapshotError> {
    let have = regular(dir, name)?;
    if have == want { Ok(()) } else { refuse(format!("{name} has {have} bytes, the manifest says {want}")) }
}

fn read(dir: &Path, name: &str, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    let size = regular(dir, name)?;
    if size > limit {
        return refuse(format!("{name} has {size} bytes, more than {limit}"));
    }
    let path = dir.join(name);
    let mut bytes = Vec::new();
    // Bounded again: the file may grow while it is read.
    File::open(&path)
        .and_then(|file| file.take(limit).read_to_end(&mut bytes))
        .map_err(|source| SnapshotError::Io { path, source })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
