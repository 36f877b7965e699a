//! Freeze: memory, device state and disk at one instant.
//!
//! ```text
//!   runs    an empty top layer is made and shown to QEMU; what the guest wrote to the old one is flushed;
//!           the new image becomes a reflink of the memory image the machine runs on; pages are looked at
//!   stop ── pages are read into a buffer │ device state is saved, the disk switches to the new top ── cont
//!   runs    pages are written out; the old top gets its name in the frozen directory
//! ```
//!
//! The pause holds only what needs the machine to stand still. A crash of ours anywhere in it is mended by
//! whoever adopts the machine: the record names the top that was about to be switched to, and whether the
//! machine was parked by its user.

use super::{chain, disk, jail, machine::Running, memory::Copier, thaw::QemuFrozen};
use crate::{
    EngineError, FreezeReport, Image, Result, VmPaths,
    files::{clear_image, now},
    layers::{layer_path, link_layers, make_top, new_name},
    process::{blocking, remove_file},
    record::{Layer, Record, SAVED},
    steps::Stopwatch,
    users,
};
use keiki_snapshot::{Format, KIND, MAX_STATE, MEMORY_FILE, Manifest, Memory, STATE_FILE, State, VERSION};
use serde_json::json;
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Freezes the machine into `image`. On error the image's directory is empty and the machine goes on.
pub(super) async fn freeze(machine: &Running, image: Image) -> Result<(QemuFrozen, FreezeReport)> {
    let mut record = machine.record.lock().await;
    if image.shape != machine.shape {
        return Err(EngineError::Monitor("has another shape than the image".into()));
    }
    let frozen = try_freeze(machine, &mut record, &image).await;
    if frozen.is_err() {
        abandon(machine, &mut record).await;
        let dir = image.dir.clone();
        blocking(move || clear_image(&dir)).await?;
    }
    frozen
}

async fn try_freeze(
    machine: &Running,
    record: &mut Record,
    image: &Image,
) -> Result<(QemuFrozen, FreezeReport)> {
    let mut watch = Stopwatch::start();
    let made_by = machine.host.made(machine.shape).await?;
    let (copier, node) = prepare(machine, record, image).await?;
    let saved = Saved::prepare(&machine.paths, record.user)?;
    watch.step("prepare");
    let (copied, pause) = stand_still(machine, record, image, copier, &node, &mut watch).await?;
    let copier = copied?;
    let (dir, from, layers) = (image.dir.clone(), machine.paths.dir.clone(), record.layers.clone());
    let disk_mib = machine.shape.disk_mib;
    let (state, layers) = blocking(move || {
        copier.finish()?;
        let state = saved.keep(&dir)?;
        Ok((state, link_layers(&from, &dir, &layers, disk_mib)?))
    })
    .await?;
    watch.step("write");
    let manifest = Manifest {
        kind: KIND.into(),
        version: VERSION,
        created_at: now(),
        made_by,
        shape: machine.shape,
        memory: Memory { bytes: u64::from(machine.shape.memory_mib) << 20 },
        state,
        layers,
    };
    chain::shorten(machine, record).await;
    let frozen = QemuFrozen::new(&machine.host, &image.dir, manifest);
    Ok((frozen, FreezeReport { vcpu_pause: pause, steps: watch.done() }))
}

/// What is done before the stop: the copier, and the block node of the new top.
async fn prepare(machine: &Running, record: &mut Record, image: &Image) -> Result<(Copier, String)> {
    chain::settle(machine, record).await?;
    let next = new_name(Format::Qcow2);
    let path = layer_path(&machine.paths.dir, &next);
    record.next_top = Some(next.clone());
    record.save(&machine.paths)?;
    let pid = machine.monitor.process.pid();
    let (host, base, top) =
        (std::sync::Arc::clone(&machine.host), machine.base(), layer_path(&machine.paths.dir, &record.top));
    let (dir, disk_mib, user) = (image.dir.clone(), machine.shape.disk_mib, record.user);
    let copier = blocking(move || {
        make_top(&host.config.common, disk_mib, &path, user)?;
        // What the pause would have to flush otherwise.
        File::open(&top).and_then(|file| file.sync_data()).map_err(EngineError::at("flush", &top))?;
        Copier::prepare(pid, &base, &dir.join(MEMORY_FILE))
    })
    .await?;
    // Block nodes live as long as the monitor; a layer's name is unlike any other's.
    let node = node_name(&next);
    let dir = jail::seen(user, &machine.paths);
    let add = disk::top_node(&node, &layer_path(&dir, &next), None);
    let add = with_null_backing(add);
    machine.monitor.qmp.run("blockdev-add", add).await?;
    Ok((copier, node))
}

/// QEMU's names of nodes have at most 31 characters and begin with a letter.
pub(super) fn node_name(layer: &str) -> String {
    let plain = layer.split('.').next().unwrap_or_default();
    // The last characters of a name are random, the first are its time.
    let tail = plain.len().saturating_sub(28);
    format!("n{}", plain.get(tail..).unwrap_or_default())
}

/// Says that there is no backing: absent would mean "as the header says".
fn with_null_backing(mut node: serde_json::Value) -> serde_json::Value {
    if let Some(fields) = node.as_object_mut() {
        fields.insert("backing".into(), serde_json::Value::Null);
    }
    node
}

/// The pause. Whatever fails in it, the machine runs afterwards if it ran before.
async fn stand_still(
    machine: &Running,
    record: &mut Record,
    image: &Image,
    mut copier: Copier,
    node: &str,
    watch: &mut Stopwatch,
) -> Result<(Result<Copier>, Duration)> {
    let qmp = &machine.monitor.qmp;
    let started = Instant::now();
    qmp.run("stop", json!({})).await?;
    watch.step("stop");
    let state = jail::seen(record.user, &machine.paths).join(SAVED);
    let switch = async {
        qmp.run("xen-save-devices-state", json!({"filename": state})).await?;
        let arguments = json!({"node": record.top_node, "overlay": node});
        qmp.run("blockdev-snapshot", arguments).await
    };
    let copy = blocking(move || copier.take().map(|()| copier));
    let (switched, copied) = tokio::join!(switch, copy);
    watch.step("take");
    let resumed = if record.paused { Ok(json!({})) } else { qmp.run("cont", json!({})).await };
    watch.step("cont");
    let pause = started.elapsed();
    match switched {
        Ok(_) => promote(record, node),
        Err(error) => return Err(full_or(error, &image.dir)),
    }
    record.save(&machine.paths)?;
    resumed?;
    Ok((copied, pause))
}

/// The disk has switched: the old top is a lower layer now.
pub(super) fn promote(record: &mut Record, node: &str) {
    let Some(next) = record.next_top.take() else { return };
    let name = std::mem::replace(&mut record.top, next);
    record.layers.push(Layer { name, format: Format::Qcow2 });
    record.top_node = node.to_owned();
}

/// Forgets a top that was not switched to. Best effort: the error that led here matters more, and a file
/// that stays is removed with the machine.
pub(super) async fn abandon(machine: &Running, record: &mut Record) {
    let Some(next) = record.next_top.take() else { return };
    let path = layer_path(&machine.paths.dir, &next);
    let forgotten = machine.monitor.qmp.run("blockdev-del", json!({"node-name": node_name(&next)})).await;
    let removed = remove_file(&path);
    let saved = record.save(&machine.paths);
    for error in [forgotten.err(), removed.err(), saved.err()].into_iter().flatten() {
        tracing::debug!(%error, "after a failed freeze");
    }
}

/// QEMU tells a full disk as "an I/O error": ask the filesystem.
fn full_or(error: EngineError, dir: &Path) -> EngineError {
    const NEEDED: u64 = 1 << 20;
    let said = matches!(&error, EngineError::Monitor(why) if why.contains("No space left"));
    let free = rustix::fs::statvfs(dir).map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    if said || free.is_ok_and(|free| free < NEEDED) { EngineError::NoSpace(dir.to_owned()) } else { error }
}

/// The file that the monitor writes its device state into. It is read from the descriptor we made it with: the
/// monitor cannot put anything else into its place.
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
        users::give(&path, user)?;
        Ok(Self { file, path })
    }

    /// Copies it to where base files are, and measures what the manifest tells.
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
        users::show(&to)?;
        remove_file(&self.path)?;
        Ok(State { bytes: state.len() as u64, blake3: blake3::hash(&state).to_hex().to_string() })
    }
}
