//! The files of a frozen machine: creating, flushing and clearing them; and the store that holds
//! them.

use crate::{
    Common, EngineError, Image, Result,
    fsutil::{link, reflink, remove_dir, remove_file},
    layers::{check_layers, layer_path},
    users::chmod_readable,
};
use keiki_snapshot::{
    DiskLayer, KIND, LAYERS_DIR, MEMORY_FILE, Made, Manifest, Memory, STATE_FILE, SnapshotError, State,
    VERSION, write_manifest,
};
use keiki_types::Shape;
use std::{
    fs::{self, File},
    path::Path,
};

/// The memory image of a frozen machine that is not stored yet.
pub(crate) const BASE_FILE: &str = "base.mem";

/// Makes the memory file that a machine starts with: nothing but a hole.
pub(crate) fn make_memory(dir: &Path, shape: Shape) -> Result<()> {
    let path = dir.join(MEMORY_FILE);
    let file =
        File::options().write(true).create_new(true).open(&path).map_err(EngineError::at("make", &path))?;
    file.set_len(u64::from(shape.memory_mib) << 20).map_err(EngineError::at("size", &path))?;
    chmod_readable(&path)
}

/// Gives a machine the memory image it will run on: another name of it, or a copy that shares
/// blocks on disk and no page in memory, so that reading it shows nothing of what others read.
pub(crate) fn take_memory(image: &Image, to: &Path) -> Result<()> {
    let from = image.dir.join(MEMORY_FILE);
    if !image.alone {
        return link(&from, to);
    }
    reflink(&from, to)?;
    chmod_readable(to)
}

/// Removes what a freeze puts into an image's directory.
pub(crate) fn clear_image(dir: &Path) -> Result<()> {
    for name in [BASE_FILE, MEMORY_FILE, STATE_FILE] {
        remove_file(&dir.join(name))?;
    }
    remove_dir(&dir.join(LAYERS_DIR))
}

/// The manifest of a machine that is frozen now.
pub(crate) fn manifest(made_by: Made, shape: Shape, state: State, layers: Vec<DiskLayer>) -> Manifest {
    let now = time::OffsetDateTime::now_utc();
    Manifest {
        kind: KIND.into(),
        version: VERSION,
        created_at: now.format(&time::format_description::well_known::Rfc3339).unwrap_or_default(),
        made_by,
        shape,
        memory: Memory { bytes: u64::from(shape.memory_mib) << 20 },
        state,
        layers,
    }
}

/// Opens a snapshot directory, and checks that it is complete and was made by the engine that runs
/// `here`.
pub(crate) fn open_snapshot(dir: &Path, here: impl FnOnce(Shape) -> Made) -> Result<Manifest> {
    let refused = |why| EngineError::Refused { dir: dir.to_owned(), why };
    let manifest = keiki_snapshot::open(dir).map_err(|error| refusal(dir, error))?;
    check_layers(dir, &manifest.layers, manifest.shape.disk_mib).map_err(refused)?;
    let (made, here) = (&manifest.made_by, here(manifest.shape));
    if made.engine != here.engine {
        return Err(refused(format!("it was made by engine {}, this is {}", made.engine, here.engine)));
    }
    if made.version != here.version {
        let engine = here.engine;
        return Err(refused(format!("it was made by {engine} {}, this is {}", made.version, here.version)));
    }
    if made.machine != here.machine {
        return Err(refused("its machine has different devices than this program's machines".into()));
    }
    Ok(manifest)
}

/// Flushes everything, then writes the manifest.
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

/// An error of `snapshot` about a directory, as an error of the engine.
fn refusal(dir: &Path, error: SnapshotError) -> EngineError {
    match error {
        SnapshotError::Io { path, source } => EngineError::at("use", &path)(source),
        other => EngineError::Refused { dir: dir.to_owned(), why: other.to_string() },
    }
}

/// Can the store share blocks?
pub(crate) fn probe_store(common: &Common) -> Result<()> {
    fs::create_dir_all(&common.store).map_err(EngineError::at("make", &common.store))?;
    let failed = || EngineError::at("share blocks (reflink) in", &common.store);
    match keiki_sys::files::has_reflinks(&common.store).map_err(failed())? {
        true => Ok(()),
        false => Err(failed()(rustix::io::Errno::OPNOTSUPP.into())),
    }
}
