//! A frozen machine, and its thaw.
//!
//! A thaw gives the directory of a prepared VM its own names of every file, puts the chain under
//! the top, loads the device state, and lets the vCPUs run. After that the machine no longer needs
//! the frozen directory.

use super::{
    args::{TOP_NODE, seen},
    chain, disk,
    host::Host,
    monitor::Monitor,
    running::{QemuVm, assemble},
    waiting::WaitingVm,
};
use crate::{
    EngineError, Frozen, Image, Machine, PreparedVm, Result, VmPaths,
    files::persist,
    fsutil::{link, remove_file},
    layers::layer_path,
    prepared::Waiting,
    process::blocking,
    record::{self, Layer},
};
use async_trait::async_trait;
use keiki_snapshot::{Format, Manifest, STATE_FILE};
use keiki_sys::stopwatch::{Steps, Stopwatch};
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long loading a device state may take.
const LOAD: Duration = Duration::from_secs(30);

/// How long a monitor that failed may take to end.
const END: Duration = Duration::from_millis(300);

/// Ends a monitor that will not be a machine.
async fn end(monitor: Monitor, paths: VmPaths) {
    let killed = monitor.kill().await;
    let cleared = blocking(move || record::clear(&paths)).await;
    for error in [killed.err(), cleared.err()].into_iter().flatten() {
        tracing::warn!(%error, "a failed thaw left something behind");
    }
}

/// A machine at one instant.
pub(super) struct QemuFrozen {
    host: Arc<Host>,
    image: Image,
    manifest: Manifest,
}

impl QemuFrozen {
    pub(super) fn new(host: &Arc<Host>, dir: &Path, manifest: Manifest) -> Self {
        let image = Image { dir: dir.to_owned(), shape: manifest.shape, alone: false };
        Self { host: Arc::clone(host), image, manifest }
    }

    /// If `alone`, each machine has its own copy of the memory.
    pub(super) fn alone(mut self, alone: bool) -> Self {
        self.image.alone = alone;
        self
    }

    /// Everything but letting it run.
    pub(super) async fn fill(
        &self,
        paths: &VmPaths,
        vm: &mut WaitingVm,
        watch: &mut Stopwatch,
    ) -> Result<()> {
        let WaitingVm { record, monitor } = vm;
        let (from, to, layers) = (self.image.dir.clone(), paths.dir.clone(), self.manifest.layers.clone());
        blocking(move || {
            for layer in layers {
                link(&layer_path(&from, &layer.name), &layer_path(&to, &layer.name))?;
            }
            link(&from.join(STATE_FILE), &to.join(STATE_FILE))
        })
        .await?;
        watch.lap("link");
        let dir = seen(record.user, paths);
        self.attach_chain(&dir, &record.top, monitor).await?;
        watch.lap("disk");
        let channel = json!({"transport": "file", "filename": dir.join(STATE_FILE), "offset": 0});
        let channels = json!({"channels": [{"channel-type": "main", "addr": channel}]});
        monitor.qmp.run("migrate-incoming", channels).await?;
        loaded(monitor).await?;
        remove_file(&paths.dir.join(STATE_FILE))?;
        watch.lap("load");
        let layers = self.manifest.layers.iter();
        record.layers =
            layers.map(|layer| Layer { name: layer.name.clone(), format: layer.format }).collect();
        record.waiting = false;
        Ok(())
    }

    /// Opens the lower layers, bottom first, and puts the top over them.
    async fn attach_chain(&self, dir: &Path, top: &str, monitor: &Monitor) -> Result<()> {
        let mut below = String::new();
        for (index, layer) in self.manifest.layers.iter().enumerate() {
            let node = format!("layer{index}");
            let path = layer_path(dir, &layer.name);
            let add = match layer.format {
                Format::Raw => disk::raw_node(&node, &path),
                Format::Qcow2 => disk::overlay_node(&node, &path, &below),
            };
            monitor.qmp.run("blockdev-add", add).await?;
            below = node;
        }
        let top = disk::top_node(TOP_NODE, &layer_path(dir, top), Some(&below));
        monitor.qmp.run("blockdev-reopen", json!({"options": [top]})).await?;
        Ok(())
    }
}

/// Waits until the state is in.
async fn loaded(monitor: &Monitor) -> Result<()> {
    let started = Instant::now();
    loop {
        let info = monitor.qmp.run("query-migrate", json!({})).await?;
        match info.get("status").and_then(Value::as_str) {
            Some("completed") => return Ok(()),
            Some("failed") => {
                let why = info.get("error-desc").and_then(Value::as_str).unwrap_or("it gave no reason");
                return Err(EngineError::Monitor(format!("cannot load the device state: {why}")));
            }
            _ if started.elapsed() > LOAD => {
                return Err(EngineError::Monitor("does not finish loading the device state".into()));
            }
            _ => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

#[async_trait]
impl Frozen for QemuFrozen {
    fn image(&self) -> &Image {
        &self.image
    }

    async fn thaw(&self, prepared: PreparedVm) -> Result<(Box<dyn Machine>, Steps)> {
        let mut watch = Stopwatch::start();
        let (paths, mut vm) = prepared.take(&self.image, |waiting| match waiting {
            Waiting::Qemu(vm) => Ok(*vm),
            other => Err(other),
        })?;
        let filled = self.fill(&paths, &mut vm, &mut watch).await;
        let WaitingVm { record, monitor } = vm;
        let machine = match filled {
            Ok(()) => assemble(&self.host, monitor, &paths, record).await,
            Err(error) => Err((monitor, error)),
        };
        let started = match machine {
            Ok(machine) => start(&machine).await.map(|()| machine),
            Err((monitor, error)) => {
                // How it ended explains more than its closed socket.
                let ended = tokio::time::timeout(END, monitor.wait()).await;
                let error = ended.map_or(error, EngineError::Ended);
                end(monitor, paths).await;
                return Err(error);
            }
        };
        watch.lap("run");
        let machine = started?;
        Ok((Box::new(machine), watch.into_steps()))
    }

    async fn persist(&self) -> Result<Manifest> {
        let (dir, manifest) = (self.image.dir.clone(), self.manifest.clone());
        blocking(move || persist(&dir, manifest)).await
    }
}

async fn start(vm: &Arc<QemuVm>) -> Result<()> {
    let monitor = &vm.backend.monitor;
    let run = async {
        monitor.qmp.run("cont", json!({})).await?;
        // One more round of the monitor's loop, in which the guest learns that its agent port has
        // closed. A connection made before would hide that from it.
        monitor.qmp.run("query-status", json!({})).await?;
        chain::shorten(vm, &*vm.record.lock().await).await;
        Ok(())
    };
    match run.await {
        Ok(()) => Ok(()),
        Err(error) => {
            let error = vm.explain(error);
            vm.stop().await?;
            Err(error)
        }
    }
}
