//! Thaw: a new machine that goes on where a frozen one stands.
//!
//! A prepared VM is a monitor started ahead: RAM mapped from the image (privately, no page of it touched), an empty
//! top layer without backing, sockets, waiting for a state. A thaw gives the directory its own names of every
//! file, puts the chain under the top, loads the device state, and lets the vCPUs run. The machine then
//! needs nothing of the frozen directory any more.

use super::{
    Host, args, chain, disk, jail,
    machine::{QemuMachine, assemble},
    process::Monitor,
};
use crate::{
    EngineError, Frozen, Image, Machine, PreparedVm, Result, Steps, VmPaths,
    files::{persist, take_memory},
    layers::{layer_path, make_layers_dir, make_top, new_name},
    prepared::Waiting,
    process::{blocking, remove_file},
    record::{self, Layer, Record},
    steps::Stopwatch,
    users,
};
use async_trait::async_trait;
use keiki_snapshot::{Format, MEMORY_FILE, Manifest, STATE_FILE};
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long loading a device state may take.
const LOAD: Duration = Duration::from_secs(30);

/// How long a monitor that failed may take to end by itself.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// A monitor that waits for a state.
pub(crate) struct WaitingVm {
    pub(super) record: Record,
    pub(super) monitor: Monitor,
}

impl WaitingVm {
    pub(crate) fn is_alive(&self) -> bool {
        self.monitor.has_ended().is_none()
    }

    pub(crate) fn kill(&self, dir: &Path) -> Result<()> {
        self.monitor.process.kill().map_err(EngineError::at("end the monitor of", dir))
    }

    /// Kills it and waits until it is gone.
    pub(crate) async fn end(&self) -> Result<()> {
        self.monitor.kill().await
    }
}

/// Starts a monitor for this image.
pub(super) async fn prepare(host: &Arc<Host>, image: &Image, paths: VmPaths) -> Result<PreparedVm> {
    match start_waiting(host, image, &paths).await {
        Ok(waiting) => Ok(PreparedVm::new(image, paths, Waiting::Qemu(Box::new(waiting)))),
        Err(error) => {
            record::clear(&paths)?;
            Err(error)
        }
    }
}

async fn start_waiting(host: &Arc<Host>, image: &Image, paths: &VmPaths) -> Result<WaitingVm> {
    let user = users::settle(&host.config.common, &host.users, paths)?;
    let id = user.as_ref().map(users::User::id);
    let top = new_name(Format::Qcow2);
    let path = layer_path(&paths.dir, &top);
    let memory = paths.dir.join(MEMORY_FILE);
    let job = (Arc::clone(host), image.clone(), paths.dir.clone(), path, memory);
    blocking(move || {
        let (host, image, dir, path, memory) = job;
        make_layers_dir(&dir)?;
        take_memory(&image, &memory)?;
        make_top(&host.config.common, image.shape.disk_mib, &path, id)
    })
    .await?;
    let launch = args::Launch { shape: image.shape, paths, user: id, top: &top, boot: None, tsc_khz: None };
    let monitor = Monitor::start(host, &launch, user).await?;
    let record = Record {
        version: record::VERSION,
        pid: monitor.process.pid(),
        start_time: monitor.process.start_time(),
        shape: image.shape,
        layers: Vec::new(),
        top,
        top_node: args::TOP_NODE.into(),
        next_top: None,
        unsure: false,
        paused: false,
        waiting: true,
        user: id,
    };
    record.save(paths)?;
    Ok(WaitingVm { record, monitor })
}

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

    /// With memory of which each machine has a copy.
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
                let new = layer_path(&to, &layer.name);
                fs::hard_link(layer_path(&from, &layer.name), &new).map_err(EngineError::at("link", &new))?;
            }
            let state = to.join(STATE_FILE);
            fs::hard_link(from.join(STATE_FILE), &state).map_err(EngineError::at("link", &state))
        })
        .await?;
        watch.step("link");
        let dir = jail::seen(record.user, paths);
        self.attach_chain(&dir, &record.top, monitor).await?;
        watch.step("disk");
        let channel = json!({"transport": "file", "filename": dir.join(STATE_FILE), "offset": 0});
        let channels = json!({"channels": [{"channel-type": "main", "addr": channel}]});
        monitor.qmp.run("migrate-incoming", channels).await?;
        loaded(monitor).await?;
        remove_file(&paths.dir.join(STATE_FILE))?;
        watch.step("load");
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
        let top = disk::top_node(args::TOP_NODE, &layer_path(dir, top), Some(&below));
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
                let why = info.get("error-desc").and_then(Value::as_str).unwrap_or("no reason given");
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
                // Its last words say more than that its socket closed.
                let ended = tokio::time::timeout(LAST_WORDS, monitor.wait()).await;
                let error = ended.map_or(error, EngineError::Ended);
                end(monitor, paths).await;
                return Err(error);
            }
        };
        watch.step("run");
        let machine = started?;
        Ok((Box::new(machine), watch.done()))
    }

    async fn persist(&self) -> Result<Manifest> {
        let (dir, manifest) = (self.image.dir.clone(), self.manifest.clone());
        blocking(move || persist(&dir, manifest)).await
    }
}

async fn start(machine: &QemuMachine) -> Result<()> {
    let monitor = &machine.0.monitor;
    let run = async {
        monitor.qmp.run("cont", json!({})).await?;
        // One more turn of the monitor's loop: in it the guest is told that its agent port has closed. A
        // connection made before would hide that from it.
        monitor.qmp.run("query-status", json!({})).await?;
        chain::shorten(&machine.0, &*machine.0.record.lock().await).await;
        Ok(())
    };
    match run.await {
        Ok(()) => Ok(()),
        Err(error) => {
            let error = machine.0.explain(error);
            machine.stop().await?;
            Err(error)
        }
    }
}
