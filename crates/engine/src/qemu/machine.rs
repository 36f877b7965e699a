//! A machine that runs.

use super::{Host, args, console, freeze, memory, process::Monitor};
use crate::{
    BootSpec, EngineError, FreezeReport, Frozen, Image, Machine, Result, VmPaths,
    console::tail,
    files::make_memory,
    layers::{layer_path, make_layers_dir, make_top, new_name, take_disk},
    process::{self, Task, blocking, to_the_end},
    record::{self, Layer, Record},
    users,
};
use async_trait::async_trait;
use keiki_snapshot::{Format, MEMORY_FILE};
use keiki_types::{Shape, api::MemoryUse};
use serde_json::json;
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// How long what the guest said at its end is waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The handle that the node holds.
pub(super) struct QemuMachine(pub(super) Arc<Running>);

/// The machine. Its record is locked for the length of every change.
pub(super) struct Running {
    pub(super) host: Arc<Host>,
    pub(super) monitor: Monitor,
    pub(super) paths: VmPaths,
    pub(super) shape: Shape,
    pub(super) record: Mutex<Record>,
    pub(super) console: Task,
}

impl Running {
    /// The memory image it runs on.
    pub(super) fn base(&self) -> PathBuf {
        self.paths.dir.join(MEMORY_FILE)
    }

    /// An error that knows whether the machine has ended meanwhile.
    pub(super) fn explain(&self, error: EngineError) -> EngineError {
        match self.monitor.has_ended() {
            Some(how) => EngineError::Ended(how),
            None => error,
        }
    }
}

/// A first boot.
pub(super) async fn boot(host: &Arc<Host>, spec: &BootSpec, paths: VmPaths) -> Result<QemuMachine> {
    match try_boot(host, spec, &paths).await {
        Ok(machine) => Ok(machine),
        Err(error) => {
            record::clear(&paths)?;
            Err(error)
        }
    }
}

async fn try_boot(host: &Arc<Host>, spec: &BootSpec, paths: &VmPaths) -> Result<QemuMachine> {
    let user = users::settle(&host.config.common, &host.users, paths)?;
    let id = user.as_ref().map(users::User::id);
    let (bottom, top) = (new_name(Format::Raw), new_name(Format::Qcow2));
    let bottom_path = layer_path(&paths.dir, &bottom);
    let top_path = layer_path(&paths.dir, &top);
    let job = (Arc::clone(host), spec.clone(), paths.dir.clone(), bottom_path, top_path);
    blocking(move || {
        let (host, spec, dir, bottom, top) = job;
        make_layers_dir(&dir)?;
        make_memory(&dir, spec.shape)?;
        take_disk(&spec.disk, &bottom)?;
        if id.is_some() {
            users::show(&bottom)?;
        }
        make_top(&host.config.common, spec.shape.disk_mib, &top, id)
    })
    .await?;
    let launch = args::Launch {
        shape: spec.shape,
        paths,
        user: id,
        top: &top,
        boot: Some((spec, &bottom)),
        tsc_khz: host.tsc_khz().await,
    };
    let monitor = Monitor::start(host, &launch, user).await?;
    let record = Record {
        version: record::VERSION,
        pid: monitor.process.pid(),
        start_time: monitor.process.start_time(),
        shape: spec.shape,
        layers: vec![Layer { name: bottom, format: Format::Raw }],
        top,
        top_node: args::TOP_NODE.into(),
        next_top: None,
        unsure: false,
        paused: false,
        waiting: false,
        user: id,
    };
    match assemble(host, monitor, paths, record).await {
        Ok(machine) => Ok(machine),
        Err((monitor, error)) => {
            monitor.kill().await?;
            Err(error)
        }
    }
}

/// Makes the machine of its parts: log, record. On error the monitor comes back, to be ended.
pub(super) async fn assemble(
    host: &Arc<Host>,
    monitor: Monitor,
    paths: &VmPaths,
    record: Record,
) -> std::result::Result<QemuMachine, (Monitor, EngineError)> {
    let console = match console::pump(&args::Sockets::of(paths).console, paths).await {
        Ok(console) => console,
        Err(error) => return Err((monitor, error)),
    };
    if let Err(error) = record.save(paths) {
        return Err((monitor, error));
    }
    Ok(QemuMachine(Arc::new(Running {
        host: Arc::clone(host),
        monitor,
        paths: paths.clone(),
        shape: record.shape,
        record: Mutex::new(record),
        console,
    })))
}

#[async_trait]
impl Machine for QemuMachine {
    fn paths(&self) -> &VmPaths {
        &self.0.paths
    }

    fn shape(&self) -> Shape {
        self.0.shape
    }

    async fn pause(&self) -> Result<()> {
        self.set_paused(true).await
    }

    async fn resume(&self) -> Result<()> {
        self.set_paused(false).await
    }

    async fn freeze(&self, image: Image) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let running = Arc::clone(&self.0);
        // Half of it would leave the machine parked.
        let frozen = to_the_end(async move { freeze::freeze(&running, image).await }).await;
        let (frozen, report) = frozen.map_err(|error| self.0.explain(error))?;
        Ok((Arc::new(frozen), report))
    }

    async fn stop(&self) -> Result<()> {
        // Killed before the lock is asked for: a freeze that is under way fails and lets go.
        self.0.monitor.kill().await?;
        let _record = self.0.record.lock().await;
        let paths = self.0.paths.clone();
        blocking(move || record::clear(&paths)).await
    }

    async fn ended(&self) -> String {
        let how = self.0.monitor.wait().await;
        // The guest's last words are in the socket still.
        let waited = Instant::now();
        while !self.0.console.0.is_finished() && waited.elapsed() < LAST_WORDS {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        how
    }

    async fn memory(&self) -> Result<MemoryUse> {
        let (pid, base) = (self.0.monitor.process.pid(), self.0.base());
        let guest = u64::from(self.0.shape.memory_mib) << 20;
        blocking(move || memory::memory_use(pid, &base, guest)).await.map_err(|error| self.0.explain(error))
    }

    async fn cpu_time(&self) -> Result<Option<Duration>> {
        process::cpu_time(&self.0.monitor.process)
    }

    fn agent_socket(&self) -> PathBuf {
        args::Sockets::of(&self.0.paths).agent
    }

    async fn console(&self, limit: usize) -> Vec<u8> {
        tail(&self.0.paths, limit)
    }
}

impl QemuMachine {
    async fn set_paused(&self, paused: bool) -> Result<()> {
        let running = &self.0;
        let command = if paused { "stop" } else { "cont" };
        let order = async {
            running
                .monitor
                .qmp
                .run(command, json!({}))
                .await
                .map(drop)
                .map_err(|error| running.explain(error))
        };
        record::set_paused(&running.record, &running.paths, paused, order).await
    }
}
