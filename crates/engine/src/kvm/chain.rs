//! Keeping disk chains short.
//!
//! Every freeze adds a layer, and a read that no layer answers asks all of them. Beyond [`FEW`] overlays those of a
//! machine are made one, in the background, and the machine is told to read that instead. Nothing immutable is written,
//! and relatives do not notice; the price is that the copied clusters are shared no more. A freeze waits for it only when
//! the chain would reach [`MANY`].
//!
//! `qemu-img` does the work, in a jail of its own with copies (blocks are shared) of nothing but the layers: what it
//! reads, a guest may have written.
//!
//! ```text
//!   raw ── o1 ── o2 ── o3 ── top          a copy of o1 gets what o2 and o3 have
//!   raw ────── flat ──────── top
//! ```
//!
//! The tool does not see what is below: it moves whole clusters, and a cluster that reads as zeroes stays one that says so.

use super::{fds::open_layers, machine::Running};
use crate::{
    EngineError, Result, VmPaths,
    layers::{check_overlay, layer_path, new_name},
    process::{blocking, remove_file},
    record::{Layer, Record},
    users::{give, show},
};
use keiki_control::Request;
use keiki_snapshot::Format;
use keiki_sys::{
    jail::{Jail, Limits, make_root},
    process::{Process, Setup},
};
use serde_json::{Value, json};
use std::{
    fs::{self, File, Permissions},
    io::Read,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// From here the layers are made fewer.
const FEW: usize = 8;
/// From here a freeze waits until that is done.
const MANY: usize = 32;
/// Where it is done, in the machine's directory.
pub(super) const PLACE: &str = "flat";
/// The layer that gets what the others have, and the last of these, in there.
const FLAT: &str = "flat";
/// And the copy of it that is kept.
const OURS: &str = "ours";
const LAST: &str = "last";
/// Where the jail shows that.
const INSIDE: &str = "m";
/// Where the jail's root is, in the engine's corner of the store.
const ROOT: &str = "jail-tools";
/// How long one step may take.
const PATIENCE: Duration = Duration::from_secs(300);
const LIMITS: Limits = Limits { files: 256, tasks: 512, file_bytes: 0, oom_score_adj: 500 };

/// Whose turn it is to make a machine's chain shorter.
#[derive(Default)]
pub(super) struct Shortening {
    turn: Arc<tokio::sync::Mutex<()>>,
    /// The machine has ended: whoever works, stop.
    stopped: Arc<AtomicBool>,
}

impl Shortening {
    /// Nobody works at it any more once this returns.
    pub(super) async fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let _turn = self.turn.lock().await;
    }
}

/// Begins to make the chain shorter if it is long. Errors are not the caller's: the next one tries again.
pub(super) fn shorten(machine: &Arc<Running>, record: &Record) {
    if record.layers.len() <= FEW {
        return;
    }
    let Ok(turn) = Arc::clone(&machine.shortening.turn).try_lock_owned() else { return };
    let (machine, layers) = (Arc::clone(machine), record.layers.clone());
    tokio::spawn(async move {
        let _turn = turn;
        if let Err(error) = in_background(&machine, layers).await
            && machine.monitor.watched.process.is_alive()
        {
            tracing::warn!(dir = %machine.paths.dir.display(), %error, "the disk chain stays long");
        }
    });
}

/// Before a freeze: what cannot wait is waited for.
pub(super) async fn settle(machine: &Running, record: &mut Record) -> Result<()> {
    if record.layers.len() < MANY {
        return Ok(());
    }
    // One that was begun in the background works at the same place: it must have come to its end.
    let late = |_| EngineError::Monitor("does not finish shortening its disk".into());
    let _turn = tokio::time::timeout(PATIENCE, machine.shortening.turn.lock()).await.map_err(late)?;
    let flat = flatten(machine, record.layers.clone()).await?;
    follow(machine, record, flat).await
}

async fn in_background(machine: &Running, layers: Vec<Layer>) -> Result<()> {
    let flat = flatten(machine, layers).await?;
    // A freeze that waits for us holds the record: it will do the work again, which is right, only slower.
    let Ok(mut record) = tokio::time::timeout(Duration::from_secs(1), machine.record.lock()).await else {
        return drop_flat(machine, &flat);
    };
    follow(machine, &mut record, flat).await
}

/// Layers that were made one.
struct Flat {
    of: Vec<Layer>,
    layer: Layer,
}

fn drop_flat(machine: &Running, flat: &Flat) -> Result<()> {
    remove_file(&layer_path(&machine.paths.dir, &flat.layer.name))
}

/// Makes machine and record read the new layer. Meanwhile freezes may have added more above it.
async fn follow(machine: &Running, record: &mut Record, flat: Flat) -> Result<()> {
    super::freeze::settle(machine, record).await;
    if record.next_top.is_some() || record.unsure || !record.layers.starts_with(&flat.of) {
        return drop_flat(machine, &flat);
    }
    let bottom = flat.of.iter().take(1).cloned();
    let rest = record.layers.iter().skip(flat.of.len()).cloned();
    let layers: Vec<Layer> = bottom.chain([flat.layer.clone()]).chain(rest).collect();
    let (dir, named) = (machine.paths.dir.clone(), layers.clone());
    let files = blocking(move || open_layers(&dir, &named)).await?;
    record.unsure = true;
    record.save(&machine.paths)?;
    if let Err(error) = machine.monitor.control.order(Request::Layers, files).await {
        insist(machine, record).await?;
        drop_flat(machine, &flat)?;
        return Err(error);
    }
    (record.layers, record.unsure) = (layers, false);
    record.save(&machine.paths)?;
    let dir = machine.paths.dir.clone();
    blocking(move || flat.of.iter().skip(1).try_for_each(|layer| remove_file(&layer_path(&dir, &layer.name))))
        .await
}

/// Makes the machine read the layers of its record, where it may have been told otherwise.
pub(super) async fn insist(machine: &Running, record: &mut Record) -> Result<()> {
    if !record.unsure {
        return Ok(());
    }
    let (dir, layers) = (machine.paths.dir.clone(), record.layers.clone());
    let files = blocking(move || open_layers(&dir, &layers)).await?;
    machine.monitor.control.order(Request::Layers, files).await?;
    record.unsure = false;
    record.save(&machine.paths)
}

async fn flatten(machine: &Running, of: Vec<Layer>) -> Result<Flat> {
    let (host, paths, disk_mib) = (Arc::clone(&machine.host), machine.paths.clone(), machine.shape.disk_mib);
    let user = machine.monitor.lineage.user();
    let stopped = Arc::clone(&machine.shortening.stopped);
    // The tool runs as the lineage's user, and is no stranger.
    let room = machine.monitor.lineage.admit(&paths.dir, 0);
    blocking(move || {
        let _room = room;
        let layer = Layer { name: new_name(Format::Qcow2), format: Format::Qcow2 };
        let work =
            Work { config: &host.config.common, place: paths.dir.join(PLACE), user, disk_mib, stopped };
        let made = work.run(&paths, &of, &layer);
        // Copies and other names: nothing is lost with them.
        remove_place(&work.place)?;
        made?;
        check_overlay(&paths.dir, &layer.name, disk_mib)
            .map_err(|why| EngineError::Monitor(format!("left a bad disk: {why}")))?;
        Ok(Flat { of, layer })
    })
    .await
}

/// Removes what a work that was cut short has left.
pub(super) fn remove_place(place: &Path) -> Result<()> {
    match fs::remove_dir_all(place) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(EngineError::at("remove", place)(error))
        }
        _ => Ok(()),
    }
}

struct Work<'a> {
    config: &'a crate::Common,
    place: PathBuf,
    user: Option<u32>,
    disk_mib: u32,
    stopped: Arc<AtomicBool>,
}

impl Work<'_> {
    fn run(&self, paths: &VmPaths, of: &[Layer], flat: &Layer) -> Result<()> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(EngineError::Ended("its machine was ended".into()));
        }
        remove_place(&self.place)?;
        fs::create_dir(&self.place).map_err(EngineError::at("make", &self.place))?;
        if let Some(user) = self.user {
            fs::set_permissions(&self.place, Permissions::from_mode(0o710))
                .and_then(|()| chown(&self.place, Some(0), Some(user)))
                .map_err(EngineError::at("close", &self.place))?;
        }
        let overlays: Vec<_> = of.iter().skip(1).map(|layer| layer_path(&paths.dir, &layer.name)).collect();
        let [first, between @ .., last] = overlays.as_slice() else {
            return Err(EngineError::Monitor("has no layers to make one".into()));
        };
        self.copy(first, FLAT)?;
        let mut names = Vec::new();
        for (index, layer) in between.iter().enumerate() {
            let name = format!("between{index}");
            super::freeze::link(layer, &self.place.join(&name))?;
            names.push(name);
        }
        self.copy(last, LAST)?;
        names.push(LAST.into());
        self.commit(&names)?;
        let (made, kept) = (self.place.join(FLAT), layer_path(&paths.dir, &flat.name));
        // As a copy that is ours: whoever wrote it may still have it open.
        let ours = self.place.join(OURS);
        let from = File::open(&made).map_err(EngineError::at("open", &made))?;
        let to = File::create_new(&ours).map_err(EngineError::at("make", &ours))?;
        keiki_sys::files::reflink(&from, &to).map_err(EngineError::at("fill", &ours))?;
        show(&ours)?;
        to.sync_all().map_err(EngineError::at("flush", &ours))?;
        fs::rename(&ours, &kept).map_err(EngineError::at("keep", &kept))
    }

    /// A copy of a layer that the tool may change.
    fn copy(&self, layer: &Path, name: &str) -> Result<()> {
        let path = self.place.join(name);
        let from = File::open(layer).map_err(EngineError::at("open", layer))?;
        let to = File::create_new(&path).map_err(EngineError::at("make", &path))?;
        keiki_sys::files::reflink(&from, &to).map_err(EngineError::at("fill", &path))?;
        give(&path, self.user)
    }

    /// Adds to the flat layer what those of these names have, lowest first.
    fn commit(&self, names: &[String]) -> Result<()> {
        let root = self.config.store.join(ROOT);
        let failed = || EngineError::at("jail a tool in", &root);
        let (jail, seen) = match self.user {
            Some(user) => {
                make_root(&root, &[INSIDE], &[]).map_err(failed())?;
                let file_bytes = (u64::from(self.disk_mib) << 21).saturating_add(64 << 20);
                let mut jail = Jail::new(&root, user, Limits { file_bytes, ..LIMITS }).map_err(failed())?;
                jail.bind(&self.place, &root, INSIDE, false).map_err(failed())?;
                (Some(jail), Path::new("/").join(INSIDE))
            }
            None => (None, self.place.clone()),
        };
        let mut command = Command::new(&self.config.qemu_img);
        command
            .args(["commit", "-q", "-d", "-b"])
            .arg(seen.join(FLAT))
            .arg(format!("json:{}", chain(&seen, names)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let setup = Setup { jail, ..Setup::default() };
        let (process, stderr) = Process::spawn(&mut command, setup).map_err(failed())?;
        let begun = Instant::now();
        let how = loop {
            match process.try_reap() {
                Some(how) => break how,
                None if begun.elapsed() > PATIENCE || self.stopped.load(Ordering::Acquire) => {
                    process.kill().map_err(failed())?;
                    while process.try_reap().is_none() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    break "it was stopped".into();
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        if how == "exit status 0" {
            return Ok(());
        }
        let mut why = String::new();
        // What it said is for people; without it there is how it ended.
        let _ = stderr.map(|pipe| pipe.take(400).read_to_string(&mut why));
        Err(EngineError::Monitor(format!("has layers that cannot be made one: {how} {}", why.trim())))
    }
}

/// The overlays, as the tool is told them. No layer's header names another.
fn chain(dir: &Path, names: &[String]) -> Value {
    let node = |name: &str, below: Value| {
        let file = json!({"driver": "file", "filename": dir.join(name), "locking": "off"});
        json!({"driver": "qcow2", "file": file, "backing": below})
    };
    names.iter().fold(node(FLAT, Value::Null), |below, name| node(name, below))
}

#[cfg(test)]
mod tests {
    use super::{Work, chain};
    use crate::{
        Common, VmPaths,
        layers::{check_overlay, layer_path, make_layers_dir, make_top, new_name},
        record::Layer,
    };
    use keiki_snapshot::Format;
    use serde_json::{Value, json};
    use std::{error::Error, fs, path::Path, process::Command};

    const DISK_MIB: u32 = 16;

    fn run(program: &str, args: &[&str]) -> Result<(), Box<dyn Error>> {
        let output = Command::new(program).args(args).output()?;
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned().into()),
        }
    }

    /// A chain of these layers for a tool, the last writable.
    fn opened(dir: &Path, layers: &[Layer]) -> String {
        let mut below = Value::Null;
        for layer in layers {
            let file = json!({"driver": "file", "filename": layer_path(dir, &layer.name), "locking": "off"});
            below = match layer.format {
                Format::Raw => json!({"driver": "raw", "file": file}),
                Format::Qcow2 => json!({"driver": "qcow2", "file": file, "backing": below}),
            };
        }
        format!("json:{below}")
    }

    #[test]
    fn many_layers_become_one_that_reads_the_same() -> Result<(), Box<dyn Error>> {
        let Some(store) = std::env::var_os("KEIKI_TEST_STORE") else {
            keiki_testing::skip("guest", "KEIKI_TEST_STORE names no directory with reflinks");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(store)?;
        let common = Common::new(dir.path().join("store"));
        let paths = VmPaths { dir: dir.path().join("m"), run_dir: dir.path().join("m"), netns: None };
        make_layers_dir(&paths.dir)?;
        let mut of = vec![Layer { name: new_name(Format::Raw), format: Format::Raw }];
        fs::write(layer_path(&paths.dir, &of[0].name), vec![0x11; (DISK_MIB as usize) << 20])?;
        for number in 1..=5_u8 {
            let layer = Layer { name: new_name(Format::Qcow2), format: Format::Qcow2 };
            let path = layer_path(&paths.dir, &layer.name);
            make_top(&common, DISK_MIB, &path, None)?;
            of.push(layer);
            let writes = format!("write -P {} {}k 300k", 0x20 + number, u32::from(number) * 200);
            // Zeroes over data of the bottom, and over what the layer before has; some of them written over again.
            let zeroes = format!("write -z {}k 200k", 4096 + u32::from(number) * 100);
            let opened = opened(&paths.dir, &of);
            run(
                "qemu-io",
                &["-c", &writes, "-c", &zeroes, "-c", "discard 8M 1M", "-c", "write -P 9 9M 4k", &opened],
            )?;
        }
        let flat = Layer { name: new_name(Format::Qcow2), format: Format::Qcow2 };
        let user = common.first_user;
        let (place, stopped) = (dir.path().join("m/flat"), Default::default());
        let work = Work { config: &common, place, user, disk_mib: DISK_MIB, stopped };
        work.run(&paths, &of, &flat)?;
        check_overlay(&paths.dir, &flat.name, DISK_MIB)?;
        let short = [of[0].clone(), flat.clone()];
        let [long, short] = [opened(&paths.dir, &of), opened(&paths.dir, &short)];
        run("qemu-img", &["compare", "-U", &long, &short])?;
        assert!(chain(Path::new("/m"), &["last".into()]).to_string().contains(r#""filename":"/m/flat""#));
        // Something that is no layer is told, and nothing is kept of it.
        fs::write(layer_path(&paths.dir, &of[2].name), "no layer")?;
        let other = Layer { name: new_name(Format::Qcow2), format: Format::Qcow2 };
        let failed = work.run(&paths, &of, &other).map_err(|error| error.to_string());
        assert!(failed.as_ref().is_err_and(|why| why.contains("cannot be made one")), "{failed:?}");
        assert!(!layer_path(&paths.dir, &other.name).exists());
        Ok(())
    }
}
