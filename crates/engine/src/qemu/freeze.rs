//! Freeze: memory, device state and disk at one instant.
//!
//! ```text
//!   runs    an empty top layer is made and shown to QEMU; what the guest wrote to the old one is flushed;
//!           the new image becomes a reflink of the memory image the machine runs on; pages are looked at
//!   stop ── pages are read into a buffer │ device state is saved, the disk switches to the new top ── cont
//!   runs    pages are written out; the old top gets its name in the frozen directory
//! ```
//!
//! The pause covers only the steps that need the machine stopped. If the node dies at any point of
//! a freeze, adopting the machine repairs it: the record names the top that was about to be
//! switched to, and whether the machine was parked by its user.

use super::{
    args::seen,
    chain, disk,
    frozen::QemuFrozen,
    host::made,
    ram_copy::Copier,
    running::{QemuVm, Record},
};
use crate::{
    EngineError, FreezeReport, Image, Result, VmPaths,
    files::manifest,
    fsutil::remove_file,
    layers::{layer_path, link_layers, make_top, new_name},
    process::blocking,
    record::SAVED,
    users::{chmod_readable, chown_to},
};
use keiki_snapshot::{Format, MAX_STATE, MEMORY_FILE, STATE_FILE, State};
use keiki_sys::stopwatch::Stopwatch;
use serde_json::json;
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Freezes the machine into `image`.
pub(super) async fn freeze(
    vm: &QemuVm,
    record: &mut Record,
    image: &Image,
) -> Result<(QemuFrozen, FreezeReport)> {
    let mut watch = Stopwatch::start();
    let made_by = made(vm.host.version().await?, vm.shape);
    let (copier, node) = prepare(vm, record, image).await?;
    let saved = Saved::prepare(&vm.paths, record.user)?;
    watch.lap("prepare");
    let (copied, pause) = stand_still(vm, record, image, copier, &node, &mut watch).await?;
    let copier = copied?;
    let (dir, from, layers) = (image.dir.clone(), vm.paths.dir.clone(), record.layers.clone());
    let disk_mib = vm.shape.disk_mib;
    let (state, layers) = blocking(move || {
        copier.finish()?;
        let state = saved.keep(&dir)?;
        Ok((state, link_layers(&from, &dir, &layers, disk_mib)?))
    })
    .await?;
    watch.lap("write");
    let manifest = manifest(made_by, vm.shape, state, layers);
    chain::shorten(vm, record).await;
    let frozen = QemuFrozen::new(&vm.host, &image.dir, manifest);
    Ok((frozen, FreezeReport { vcpu_pause: pause, steps: watch.into_steps() }))
}

/// The work before the machine stops: the copier, and the block node of the new top.
async fn prepare(vm: &QemuVm, record: &mut Record, image: &Image) -> Result<(Copier, String)> {
    chain::wait_short_enough(vm, record).await?;
    let next = new_name(Format::Qcow2);
    let path = layer_path(&vm.paths.dir, &next);
    record.next_top = Some(next.clone());
    record.save(&vm.paths)?;
    let pid = vm.backend.monitor.process().pid();
    let (host, base, top) =
        (Arc::clone(&vm.host), vm.paths.dir.join(MEMORY_FILE), layer_path(&vm.paths.dir, &record.top));
    let (dir, disk_mib, user) = (image.dir.clone(), vm.shape.disk_mib, record.user);
    let copier = blocking(move || {
        make_top(&host.config.common, disk_mib, &path, user)?;
        // What the pause would have to flush otherwise.
        File::open(&top).and_then(|file| file.sync_data()).map_err(EngineError::at("flush", &top))?;
        Copier::prepare(pid, &base, &dir.join(MEMORY_FILE))
    })
    .await?;
    // Block nodes live as long as the monitor; no two layers have one name.
    let node = node_name(&next);
    let dir = seen(user, &vm.paths);
    let add = disk::top_node(&node, &layer_path(&dir, &next), None);
    vm.backend.monitor.qmp.run("blockdev-add", add).await?;
    Ok((copier, node))
}

/// QEMU's names of nodes have at most 31 characters and begin with a letter.
pub(super) fn node_name(layer: &str) -> String {
    let plain = layer.split('.').next().unwrap_or_default();
    // The last characters of a name are random, the first are its time.
    let tail = plain.len().saturating_sub(28);
    format!("n{}", plain.get(tail..).unwrap_or_default())
}

/// The pause. Whatever fails in it, the machine runs afterwards if it ran before.
async fn stand_still(
    vm: &QemuVm,
    record: &mut Record,
    image: &Image,
    mut copier: Copier,
    node: &str,
    watch: &mut Stopwatch,
) -> Result<(Result<Copier>, Duration)> {
    let qmp = &vm.backend.monitor.qmp;
    let started = Instant::now();
    qmp.run("stop", json!({})).await?;
    watch.lap("stop");
    let state = seen(record.user, &vm.paths).join(SAVED);
    let switch = async {
        qmp.run("xen-save-devices-state", json!({"filename": state})).await?;
        let arguments = json!({"node": record.engine.top_node, "overlay": node});
        qmp.run("blockdev-snapshot", arguments).await
    };
    let copy = blocking(move || copier.take().map(|()| copier));
    let (switched, copied) = tokio::join!(switch, copy);
    watch.lap("take");
    let resumed = if record.paused { Ok(json!({})) } else { qmp.run("cont", json!({})).await };
    watch.lap("cont");
    let pause = started.elapsed();
    match switched {
        Ok(_) => promote(record, node),
        Err(error) => return Err(full_or(error, &image.dir)),
    }
    record.save(&vm.paths)?;
    resumed?;
    Ok((copied, pause))
}

/// The disk has switched: the old top is a lower layer now.
pub(super) fn promote(record: &mut Record, node: &str) {
    if record.next_top.is_some() {
        record.promote();
        record.engine.top_node = node.to_owned();
    }
}

/// Forgets a top that was not switched to. Best effort: the error that led here matters more, and a
/// file that stays is removed with the machine.
pub(super) async fn abandon(vm: &QemuVm, record: &mut Record) {
    let Some(next) = record.next_top.take() else { return };
    let path = layer_path(&vm.paths.dir, &next);
    let forgotten = vm.backend.monitor.qmp.run("blockdev-del", json!({"node-name": node_name(&next)})).await;
    let removed = remove_file(&path);
    let saved = record.save(&vm.paths);
    for error in [forgotten.err(), removed.err(), saved.err()].into_iter().flatten() {
        tracing::debug!(%error, "after a failed freeze");
    }
}

/// QEMU reports a full disk as "an I/O error": ask the filesystem.
fn full_or(error: EngineError, dir: &Path) -> EngineError {
    const NEEDED: u64 = 1 << 20;
    let said = matches!(&error, EngineError::Monitor(why) if why.contains("No space left"));
    let free = rustix::fs::statvfs(dir).map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    if said || free.is_ok_and(|free| free < NEEDED) { EngineError::NoSpace(dir.to_owned()) } else { error }
}

/// The file that the monitor writes its device state into. It is read from the descriptor we made
/// it with: the monitor cannot put anything else into its place.
struct Saved {
    file: File,
    path: PathBuf,
}

impl Saved {
    fn prepare(paths: &VmPaths, user: Option<u32>) -> Result<Self> {
        let path = paths.dir.join(SAVED);
        remove_file(&path)?;
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(EngineError::at("make", &path))?;
        chown_to(&path, user)?;
        Ok(Self { file, path })
    }

    /// Copies it to the base files, and measures what the manifest records.
    fn keep(self, dir: &Path) -> Result<State> {
        let (mut state, to) = (Vec::new(), dir.join(STATE_FILE));
        (&self.file)
            .take(MAX_STATE + 1)
            .read_to_end(&mut state)
            .map_err(EngineError::at("read", &self.path))?;
        if state.is_empty() || state.len() as u64 > MAX_STATE {
            return Err(EngineError::Monitor(format!("saved {} bytes of device state", state.len())));
        }
        fs::write(&to, &state).map_err(EngineError::at("write", &to))?;
        chmod_readable(&to)?;
        remove_file(&self.path)?;
        Ok(State { bytes: state.len() as u64, blake3: blake3::hash(&state).to_hex().to_string() })
    }
}
