//! The files of a frozen machine: made, flushed, cleared; and the store that they lie on.

use crate::{Common, EngineError, Image, Result, layers::layer_path, process::remove_file, users::show};
use keiki_snapshot::{LAYERS_DIR, MEMORY_FILE, Manifest, STATE_FILE, SnapshotError, write_manifest};
use keiki_types::Shape;
use std::{
    fs::{self, File},
    path::Path,
};

/// Makes the memory file that a machine starts with: nothing but a hole.
pub(crate) fn make_memory(dir: &Path, shape: Shape) -> Result<()> {
    let path = dir.join(MEMORY_FILE);
    let file =
        File::options().write(true).create_new(true).open(&path).map_err(EngineError::at("make", &path))?;
    file.set_len(u64::from(shape.memory_mib) << 20).map_err(EngineError::at("size", &path))?;
    show(&path)
}

/// Gives a machine the memory image it will run on: another name of it, or a copy that shares blocks on disk and no
/// page in memory, so that what is read of it tells nothing of what others read.
pub(crate) fn take_memory(image: &Image, to: &Path) -> Result<()> {
    let from = image.dir.join(MEMORY_FILE);
    if !image.alone {
        return fs::hard_link(&from, to).map_err(EngineError::at("link", to));
    }
    let source = File::open(&from).map_err(EngineError::at("open", &from))?;
    let copy = File::options().write(true).create_new(true).open(to).map_err(EngineError::at("make", to))?;
    keiki_sys::files::reflink(&source, &copy).map_err(EngineError::at("fill", to))?;
    show(to)
}

/// Removes what a freeze puts into an image's directory.
pub(crate) fn clear_image(dir: &Path) -> Result<()> {
    for name in [MEMORY_FILE, STATE_FILE] {
        remove_file(&dir.join(name))?;
    }
    let layers = dir.join(LAYERS_DIR);
    match fs::remove_dir_all(&layers) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(EngineError::at("remove", &layers)(error))
        }
        _ => Ok(()),
    }
}

/// Flushes everything, then says so in the manifest.
pub(crate) fn persist(dir: &Path, manifest: Manifest) -> Result<Manifest> {
    let flush = |path: &Path| {
        File::open(path).and_then(|file| file.sync_all()).map_err(EngineError::at("flush", path))
    };
    for layer in &manifest.layers {
        flush(&layer_path(dir, &layer.name))?;
    }
    flush(&dir.join(MEMORY_FILE))?;
    flush(&dir.join(STATE_FILE))?;
    flush(&dir.join(LAYERS_DIR))?;
    flush(dir)?;
    if let Some(parent) = dir.parent() {
        flush(parent)?;
    }
    keiki_sys::failpoint::reach("flush");
    write_manifest(dir, &manifest).map_err(|error| refusal(dir, error))?;
    Ok(manifest)
}

/// The time as a manifest has it.
pub(crate) fn now() -> String {
    let now = time::OffsetDateTime::now_utc();
    now.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}

/// What `snapshot` says of a directory, as an engine says it.
pub(crate) fn refusal(dir: &Path, error: SnapshotError) -> EngineError {
    match error {
        SnapshotError::Io { path, source } => EngineError::at("use", &path)(source),
        other => EngineError::Refused { dir: dir.to_owned(), why: other.to_string() },
    }
}

/// An error and its causes in one line.
pub(crate) fn sentence(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Can the store share blocks?
pub(crate) fn probe_store(common: &Common) -> Result<()> {
    fs::create_dir_all(&common.store).map_err(EngineError::at("make", &common.store))?;
    let name = uuid::Uuid::now_v7().simple().to_string();
    let (from, to) = (common.store.join(format!(".{name}.a")), common.store.join(format!(".{name}.b")));
    let probe = || -> std::io::Result<()> {
        fs::write(&from, [1; 4096])?;
        keiki_sys::files::reflink(File::open(&from)?, File::create_new(&to)?)
    };
    let result = probe().map_err(EngineError::at("share blocks (reflink) in", &common.store));
    remove_file(&from)?;
    remove_file(&to)?;
    result
}
