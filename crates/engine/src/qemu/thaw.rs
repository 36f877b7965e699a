//! Thaw: a new machine that goes on where a frozen one stands.
//!
//! A seat is a monitor started ahead: RAM mapped from the image (privately, no page of it touched), an empty
//! top layer without backing, sockets, waiting for a state. A thaw gives the directory its own names of every
//! file, puts the chain under the top, loads the device state, and lets the vCPUs run. The machine then
//! needs nothing of the frozen directory any more.

use super::{
    Host, args, chain, disk, jail,
    machine::{QemuMachine, assemble},
    process::Monitor,
};
use crate::{
    EngineError, Frozen, Image, Machine, Resources, Result, Seat, Steps,
    files::{persist, take_memory},
    layers::{layer_path, make_layers_dir, make_top, new_name},
    process::{blocking, remove_file},
    record::{self, Layer, Record},
    steps::Stopwatch,
    users,
};
use async_trait::async_trait;
use keiki_snapshot::{Format, MEMORY_FILE, Manifest, STATE_FILE};
use serde_json::{Value, json};
use std::{
    any::Any,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long loading a device state may take.
const LOAD: Duration = Duration::from_secs(30);

/// How long a monitor that failed may take to end by itself.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// A monitor that waits.
pub(super) struct QemuSeat {
    pub(super) resources: Resources,
    image: Image,
    pub(super) record: Record,
    /// None once it was taken: nothing is left to end.
    pub(super) monitor: Option<Monitor>,
}

impl QemuSeat {
    pub(super) async fn start(host: &Arc<Host>, image: &Image, resources: Resources) -> Result<Self> {
        match Self::try_start(host, image, &resources).await {
            Ok(seat) => Ok(seat),
            Err(error) => {
                record::clear(&resources)?;
                Err(error)
            }
        }
    }

    async fn try_start(host: &Arc<Host>, image: &Image, resources: &Resources) -> Result<Self> {
        let user = users::settle(&host.config.common, &host.users, resources)?;
        let id = user.as_ref().map(users::User::id);
        let top = new_name(Format::Qcow2);
        let path = layer_path(&resources.dir, &top);
        let memory = resources.dir.join(MEMORY_FILE);
        let job = (Arc::clone(host), image.clone(), resources.dir.clone(), path, memory);
        blocking(move || {
            let (host, image, dir, path, memory) = job;
            make_layers_dir(&dir)?;
            take_memory(&image, &memory)?;
            make_top(&host.config.common, image.shape.disk_mib, &path, id)
        })
        .await?;
        let launch =
            args::Launch { shape: image.shape, resources, user: id, top: &top, boot: None, tsc_khz: None };
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
        record.save(resources)?;
        Ok(Self { resources: resources.clone(), image: image.clone(), record, monitor: Some(monitor) })
    }
}

#[async_trait]
impl Seat for QemuSeat {
    fn resources(&self) -> &Resources {
        &self.resources
    }

    fn is_alive(&self) -> bool {
        self.monitor.as_ref().is_some_and(|monitor| monitor.has_ended().is_none())
    }

    async fn cancel(mut self: Box<Self>) {
        if let Some(monitor) = self.monitor.take() {
            end(monitor, self.resources.clone()).await;
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl Drop for QemuSeat {
    fn drop(&mut self) {
        let Some(monitor) = self.monitor.take() else { return };
        let ended = monitor.process.kill().map_err(EngineError::at("end", &self.resources.dir));
        if let Err(error) = ended.and_then(|()| record::clear(&self.resources)) {
            tracing::warn!(%error, "a seat left something behind");
        }
    }
}

/// Ends a monitor that will not be a machine.
async fn end(monitor: Monitor, resources: Resources) {
    let killed = monitor.kill().await;
    let cleared = blocking(move || record::clear(&resources)).await;
    for error in [killed.err(), cleared.err()].into_iter().flatten() {
        tracing::warn!(%error, "a seat left something behind");
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
        seat: &mut QemuSeat,
        monitor: &Monitor,
        watch: &mut Stopwatch,
    ) -> Result<()> {
        let (from, to, layers) =
            (self.image.dir.clone(), seat.resources.dir.clone(), self.manifest.layers.clone());
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
        self.attach_chain(seat, monitor).await?;
        watch.step("disk");
        let state = jail::seen(seat.record.user, &seat.resources).join(STATE_FILE);
        let channel = json!({"transport": "file", "filename": state, "offset": 0});
        let channels = json!({"channels": [{"channel-type": "main", "addr": channel}]});
        monitor.qmp.run("migrate-incoming", channels).await?;
        loaded(monitor).await?;
        remove_file(&seat.resources.dir.join(STATE_FILE))?;
        watch.step("load");
        let (waiting, layers) = (
            false,
            self.manifest
                .layers
                .iter()
                .map(|layer| Layer { name: layer.name.clone(), format: layer.format })
                .collect(),
        );
        seat.record = Record { waiting, layers, ..seat.record.clone() };
        Ok(())
    }

    /// Opens the lower layers, bottom first, and puts the top over them.
    async fn attach_chain(&self, seat: &QemuSeat, monitor: &Monitor) -> Result<()> {
        let dir = jail::seen(seat.record.user, &seat.resources);
        let mut below = String::new();
        for (index, layer) in self.manifest.layers.iter().enumerate() {
            let node = format!("layer{index}");
            let path = layer_path(&dir, &layer.name);
            let add = match layer.format {
                Format::Raw => disk::raw_node(&node, &path),
                Format::Qcow2 => disk::overlay_node(&node, &path, &below),
            };
            monitor.qmp.run("blockdev-add", add).await?;
            below = node;
        }
        let top = layer_path(&dir, &seat.record.top);
        let top = disk::top_node(args::TOP_NODE, &top, Some(&below));
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

    async fn thaw(&self, seat: Box<dyn Seat>) -> Result<(Box<dyn Machine>, Steps)> {
        let mut seat = seat
            .into_any()
            .downcast::<QemuSeat>()
            .map_err(|_| EngineError::Monitor("is a seat of another engine".into()))?;
        if seat.image != self.image {
            return Err(EngineError::Monitor("is a seat of another image".into()));
        }
        let mut watch = Stopwatch::start();
        let Some(monitor) = seat.monitor.take() else {
            return Err(EngineError::Monitor("was taken from its seat".into()));
        };
        let machine = match self.fill(&mut seat, &monitor, &mut watch).await {
            Ok(()) => assemble(&self.host, monitor, &seat.resources, seat.record.clone()).await,
            Err(error) => Err((monitor, error)),
        };
        let started = match machine {
            Ok(machine) => start(&machine).await.map(|()| machine),
            Err((monitor, error)) => {
                // Its last words say more than that its socket closed.
                let ended = tokio::time::timeout(LAST_WORDS, monitor.wait()).await;
                let error = ended.map_or(error, EngineError::Ended);
                end(monitor, seat.resources.clone()).await;
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
