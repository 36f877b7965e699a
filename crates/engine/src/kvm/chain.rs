//! Keeping disk chains short.
//!
//! Every freeze adds a layer, and a read of a cluster that no layer has searches all of them. Above
//! [`FEW`] layers the overlays of a machine are merged into one in the background, and the machine
//! switches to reading that instead. Nothing immutable is written, and relatives do not notice; the
//! price is that the copied clusters are no longer shared. A freeze waits for it only when the
//! chain would reach [`MANY`].
//!
//! `qemu-img` does the work, in a jail, on copies of the layers (blocks are shared), because a
//! guest may have written their contents.
//!
//! ```text
//!   raw ── o1 ── o2 ── o3 ── top          a copy of o1 gets what o2 and o3 have
//!   raw ────── flat ──────── top
//! ```
//!
//! The tool does not see what is below: it moves whole clusters, and a cluster that reads as zeroes
//! stays a zero cluster.

use super::{
    fds::open_layers,
    running::{KvmVm, Record, reconcile, reconcile_layers},
};
use crate::{
    Common, EngineError, Result, VmPaths,
    fsutil::{link, reflink, remove_dir, remove_file},
    layers::{check_overlay, layer_path, new_name},
    process::blocking,
    record::{FLAT_DIR, Layer},
    users::{chmod_readable, chown_to, close},
};
use keiki_control::Request;
use keiki_snapshot::Format;
use keiki_sys::{
    jail::{Jail, Limits, make_root},
    process::{Process, Setup},
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Above this many layers a machine's chain is shortened.
const FEW: usize = 8;
/// From this many layers upwards a freeze waits until the chain has been shortened.
const MANY: usize = 32;
/// In the working directory: the layer that gets what the others have, the last of those, and the
/// result as a copy of ours.
const FLAT: &str = "flat";
const LAST: &str = "last";
const OURS: &str = "ours";
/// The working directory as the jail shows it.
const INSIDE: &str = "m";
/// The jail's root, in the engine's corner of the store.
const ROOT: &str = "jail-tools";
/// How long one step may take.
const PATIENCE: Duration = Duration::from_secs(300);
const LIMITS: Limits = Limits { files: 256, tasks: 512, file_bytes: 0, oom_score_adj: 500 };

/// Starts to shorten the chain if it is long. On an error the next call tries again.
pub(super) fn shorten(vm: &Arc<KvmVm>, record: &Record) {
    if record.layers.len() <= FEW {
        return;
    }
    let Ok(permit) = Arc::clone(&vm.backend.shortening.permit).try_lock_owned() else { return };
    let (vm, layers) = (Arc::clone(vm), record.layers.clone());
    tokio::spawn(async move {
        let _permit = permit;
        if let Err(error) = in_background(&vm, layers).await
            && vm.backend.monitor.watched.process.is_alive()
        {
            tracing::warn!(dir = %vm.paths.dir.display(), %error, "the disk chain stays long");
        }
    });
}

/// Before a freeze: shortens a chain that is too long for one more layer.
pub(super) async fn wait_short_enough(vm: &KvmVm, record: &mut Record) -> Result<()> {
    if record.layers.len() < MANY {
        return Ok(());
    }
    // One that was begun in the background uses the same directory: it must have ended.
    let late = |_| EngineError::Monitor("does not finish shortening its disk".into());
    let permit = vm.backend.shortening.permit.lock();
    let _permit = tokio::time::timeout(PATIENCE, permit).await.map_err(late)?;
    let flat = flatten(vm, record.layers.clone()).await?;
    follow(vm, record, flat).await
}

async fn in_background(vm: &KvmVm, layers: Vec<Layer>) -> Result<()> {
    let flat = flatten(vm, layers).await?;
    // A freeze that waits for us holds the record: it does the work again, which is correct, only
    // slower.
    let Ok(mut record) = tokio::time::timeout(Duration::from_secs(1), vm.record.lock()).await else {
        return drop_flat(vm, &flat);
    };
    follow(vm, &mut record, flat).await
}

/// One layer that replaces others.
struct Flat {
    of: Vec<Layer>,
    layer: Layer,
}

fn drop_flat(vm: &KvmVm, flat: &Flat) -> Result<()> {
    remove_file(&layer_path(&vm.paths.dir, &flat.layer.name))
}

/// Makes machine and record use the new layer. Freezes may have added layers above it meanwhile.
async fn follow(vm: &KvmVm, record: &mut Record, flat: Flat) -> Result<()> {
    reconcile(vm, record).await;
    if record.next_top.is_some() || record.engine.unsure || !record.layers.starts_with(&flat.of) {
        return drop_flat(vm, &flat);
    }
    let bottom = flat.of.iter().take(1).cloned();
    let rest = record.layers.iter().skip(flat.of.len()).cloned();
    let layers: Vec<Layer> = bottom.chain([flat.layer.clone()]).chain(rest).collect();
    let (dir, named) = (vm.paths.dir.clone(), layers.clone());
    let files = blocking(move || open_layers(&dir, &named)).await?;
    record.engine.unsure = true;
    record.save(&vm.paths)?;
    if let Err(error) = vm.backend.monitor.control.order(Request::Layers, files).await {
        reconcile_layers(vm, record).await?;
        drop_flat(vm, &flat)?;
        return Err(error);
    }
    (record.layers, record.engine.unsure) = (layers, false);
    record.save(&vm.paths)?;
    let dir = vm.paths.dir.clone();
    blocking(move || flat.of.iter().skip(1).try_for_each(|layer| remove_file(&layer_path(&dir, &layer.name))))
        .await
}

async fn flatten(vm: &KvmVm, of: Vec<Layer>) -> Result<Flat> {
    let (host, paths, disk_mib) = (Arc::clone(&vm.host), vm.paths.clone(), vm.shape.disk_mib);
    let user = vm.backend.monitor.lineage.user();
    let stopped = Arc::clone(&vm.backend.shortening.stopped);
    // The tool runs as the lineage's user: it must count as a member, or it would be killed.
    let room = vm.backend.monitor.lineage.admit(&paths.dir, 0);
    blocking(move || {
        let _room = room;
        let layer = Layer { name: new_name(Format::Qcow2), format: Format::Qcow2 };
        let work =
            Work { common: &host.config.common, place: paths.dir.join(FLAT_DIR), user, disk_mib, stopped };
        let made = work.run(&paths, &of, &layer);
        // It holds only copies and links.
        remove_dir(&work.place)?;
        made?;
        check_overlay(&paths.dir, &layer.name, disk_mib)
            .map_err(|why| EngineError::Monitor(format!("left a bad disk: {why}")))?;
        Ok(Flat { of, layer })
    })
    .await
}

struct Work<'a> {
    common: &'a Common,
    /// The working directory.
    place: PathBuf,
    user: Option<u32>,
    disk_mib: u32,
    stopped: Arc<AtomicBool>,
}

impl Work<'_> {
    fn run(&self, paths: &VmPaths, of: &[Layer], flat: &Layer) -> Result<()> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(EngineError::Ended("while its disk was shortened".into()));
        }
        remove_dir(&self.place)?;
        fs::create_dir(&self.place).map_err(EngineError::at("make", &self.place))?;
        if self.user.is_some() {
            close(&self.place, 0o710, self.user)?;
        }
        let overlays: Vec<_> = of.iter().skip(1).map(|layer| layer_path(&paths.dir, &layer.name)).collect();
        let [first, between @ .., last] = overlays.as_slice() else {
            return Err(EngineError::Monitor("has no layers to merge".into()));
        };
        self.copy(first, FLAT)?;
        let mut names = Vec::new();
        for (index, layer) in between.iter().enumerate() {
            let name = format!("between{index}");
            link(layer, &self.place.join(&name))?;
            names.push(name);
        }
        self.copy(last, LAST)?;
        names.push(LAST.into());
        self.commit(&names)?;
        let (made, kept) = (self.place.join(FLAT), layer_path(&paths.dir, &flat.name));
        // As a copy: the tool may still have its file open.
        let ours = self.place.join(OURS);
        reflink(&made, &ours)?;
        chmod_readable(&ours)?;
        File::open(&ours).and_then(|file| file.sync_all()).map_err(EngineError::at("flush", &ours))?;
        fs::rename(&ours, &kept).map_err(EngineError::at("keep", &kept))
    }

    /// A copy of a layer that the tool may change.
    fn copy(&self, layer: &Path, name: &str) -> Result<()> {
        let path = self.place.join(name);
        reflink(layer, &path)?;
        chown_to(&path, self.user)
    }

    /// Copies into the flat layer what these layers have, lowest first.
    fn commit(&self, names: &[String]) -> Result<()> {
        let root = self.common.store.join(ROOT);
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
        let mut command = Command::new(&self.common.qemu_img);
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
        // Without its output the error has only how it ended.
        let _ = stderr.map(|pipe| pipe.take(400).read_to_string(&mut why));
        Err(EngineError::Monitor(format!("has layers that cannot be merged: {how} {}", why.trim())))
    }
}

/// The overlays as an argument of the tool. No layer's header names another.
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
            // Zeroes over data of the bottom, and over what the layer before has; some of them
            // written over again.
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
        let work = Work { common: &common, place, user, disk_mib: DISK_MIB, stopped };
        work.run(&paths, &of, &flat)?;
        check_overlay(&paths.dir, &flat.name, DISK_MIB)?;
        let short = [of[0].clone(), flat.clone()];
        let [long, short] = [opened(&paths.dir, &of), opened(&paths.dir, &short)];
        run("qemu-img", &["compare", "-U", &long, &short])?;
        assert!(chain(Path::new("/m"), &["last".into()]).to_string().contains(r#""filename":"/m/flat""#));
        // A file that is not a layer is reported, and nothing is kept of it.
        fs::write(layer_path(&paths.dir, &of[2].name), "no layer")?;
        let other = Layer { name: new_name(Format::Qcow2), format: Format::Qcow2 };
        let failed = work.run(&paths, &of, &other).map_err(|error| error.to_string());
        assert!(failed.as_ref().is_err_and(|why| why.contains("cannot be merged")), "{failed:?}");
        assert!(!layer_path(&paths.dir, &other.name).exists());
        Ok(())
    }
}
