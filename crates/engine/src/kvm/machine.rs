//! A machine that runs.

use super::{
    Host,
    chain::Shortening,
    control::{ANSWER, Control, unexpected},
    fds::{VmFds, kvm},
    monitor::Monitor,
    working_set::FirstRun,
};
use crate::{
    BootSpec, EngineError, FreezeReport, Frozen, Image, Machine, Result, VmPaths,
    console::tail,
    files::make_memory,
    layers::{layer_path, new_name, take_disk},
    process::{self, blocking, to_the_end},
    record::{self, AGENT, CONTROL, Layer, Record},
    users::show,
};
use async_trait::async_trait;
use keiki_control::{Answer, Boot, Devices, Reply, Request, Role, Stage};
use keiki_protocol::{AGENT_PORT, net::GUEST_MAC};
use keiki_snapshot::Format;
use keiki_types::{Shape, api::MemoryUse};
use std::{
    fs::File,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, PoisonError},
    time::Duration,
};
use tokio::sync::Mutex;

/// The handle that the node holds.
pub(super) struct KvmMachine(pub(super) Arc<Running>);

/// The machine. Its record is locked for the length of every change.
pub(super) struct Running {
    pub(super) host: Arc<Host>,
    pub(super) monitor: Monitor,
    pub(super) paths: VmPaths,
    pub(super) shape: Shape,
    pub(super) record: Mutex<Record>,
    pub(super) shortening: Shortening,
    first_run: std::sync::Mutex<Option<FirstRun>>,
}

impl Running {
    /// What it touches will be recorded.
    pub(super) fn is_looked_at(&self, first_run: Option<FirstRun>) {
        *self.first_run.lock().unwrap_or_else(PoisonError::into_inner) = first_run;
    }

    /// An error that knows whether the machine has ended meanwhile.
    pub(super) fn explain(&self, error: EngineError) -> EngineError {
        match self.monitor.last_words(&self.paths) {
            Some(how) => EngineError::Ended(how),
            None => error,
        }
    }
}

/// A first boot.
pub(super) async fn boot(host: &Arc<Host>, spec: &BootSpec, paths: VmPaths) -> Result<KvmMachine> {
    let booted = try_boot(host, spec, &paths).await;
    if booted.is_err() {
        let paths = paths.clone();
        blocking(move || record::clear(&paths)).await?;
    }
    booted
}

async fn try_boot(host: &Arc<Host>, spec: &BootSpec, paths: &VmPaths) -> Result<KvmMachine> {
    let bottom = Layer { name: new_name(Format::Raw), format: Format::Raw };
    let job = (Arc::clone(host), spec.clone(), paths.clone(), bottom.clone());
    let (top, files) = blocking(move || {
        let (host, spec, paths, bottom) = job;
        let fds = VmFds::prepare(&host, &paths, spec.shape.disk_mib)?;
        make_memory(&paths.dir, spec.shape)?;
        let path = layer_path(&paths.dir, &bottom.name);
        take_disk(&spec.disk, &path)?;
        show(&path)?;
        let top = fds.top.clone();
        let mut files = fds.with_layers(&paths.dir, &[bottom])?;
        files.push(kvm()?);
        for (role, path) in [(Role::Kernel, &spec.kernel), (Role::Initrd, &spec.initrd)] {
            files.push((role, OwnedFd::from(File::open(path).map_err(EngineError::at("open", path))?)));
        }
        Ok((top, files))
    })
    .await?;
    let lineage = host.lineages.found(host)?;
    let mut monitor = Monitor::blank(host, &lineage, spec.shape, &paths.dir).await?;
    let boot = Boot {
        shape: shape(spec.shape),
        cmdline: cmdline(spec, host.tsc_khz().await),
        devices: Devices { mac: mac(GUEST_MAC)?, agent_port: AGENT_PORT.into(), disks: Vec::new() },
        generation: generation(),
    };
    if let Err(error) = monitor.control.order(Request::Boot(boot), files).await {
        return Err(monitor.give_up(error).await);
    }
    monitor.control = Control::at(paths.run_dir.join(CONTROL));
    let record = new_record(&monitor, spec.shape, vec![bottom], top);
    assemble(host, monitor, paths, record).await
}

/// A record of a machine that has just begun.
pub(super) fn new_record(monitor: &Monitor, shape: Shape, layers: Vec<Layer>, top: String) -> Record {
    Record {
        version: record::VERSION,
        pid: monitor.pid(),
        start_time: monitor.watched.process.start_time(),
        shape,
        layers,
        top,
        top_node: String::new(),
        next_top: None,
        unsure: false,
        paused: false,
        waiting: false,
        user: monitor.lineage.user(),
    }
}

/// Makes the machine of its parts, if it answers. On error its process is ended.
pub(super) async fn assemble(
    host: &Arc<Host>,
    monitor: Monitor,
    paths: &VmPaths,
    record: Record,
) -> Result<KvmMachine> {
    let answered = match monitor.control.hello().await {
        Ok((hello, pid)) if hello.stage == Stage::Machine && pid == monitor.pid() => record.save(paths),
        Ok(_) => Err(EngineError::Monitor("is not the machine that listens".into())),
        Err(error) => Err(error),
    };
    if let Err(error) = answered {
        let how = monitor.last_words(paths);
        return Err(monitor.give_up(how.map_or(error, EngineError::Ended)).await);
    }
    Ok(KvmMachine(Arc::new(Running {
        host: Arc::clone(host),
        monitor,
        paths: paths.clone(),
        shape: record.shape,
        record: Mutex::new(record),
        shortening: Shortening::default(),
        first_run: std::sync::Mutex::default(),
    })))
}

#[async_trait]
impl Machine for KvmMachine {
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
        // Half of it would leave the record behind the machine.
        let frozen = to_the_end(async move { super::freeze::freeze(&running, image).await }).await;
        let (frozen, report) = frozen.map_err(|error| self.0.explain(error))?;
        Ok((Arc::new(frozen), report))
    }

    async fn stop(&self) -> Result<()> {
        let first_run = self.0.first_run.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(first_run) = first_run {
            first_run.ends().await;
        }
        // Killed before the lock is asked for: a freeze that is under way fails and lets go.
        self.0.monitor.watched.kill().await?;
        self.0.shortening.stop().await;
        let _record = self.0.record.lock().await;
        let paths = self.0.paths.clone();
        blocking(move || clear(&paths)).await
    }

    async fn ended(&self) -> String {
        self.0.monitor.watched.wait().await;
        self.0.monitor.last_words(&self.0.paths).unwrap_or_else(|| "unknown".into())
    }

    async fn memory(&self) -> Result<MemoryUse> {
        let (pid, shape) = (self.0.monitor.pid(), self.0.shape);
        blocking(move || super::memory::memory_use(pid, shape)).await.map_err(|error| self.0.explain(error))
    }

    async fn cpu_time(&self) -> Result<Option<Duration>> {
        process::cpu_time(&self.0.monitor.watched.process)
    }

    fn agent_socket(&self) -> PathBuf {
        self.0.paths.run_dir.join(AGENT)
    }

    async fn console(&self, limit: usize) -> Vec<u8> {
        tail(&self.0.paths, limit)
    }
}

impl KvmMachine {
    async fn set_paused(&self, paused: bool) -> Result<()> {
        let running = &self.0;
        let request = if paused { Request::Pause } else { Request::Resume };
        let order = async {
            running.monitor.control.order(request, Vec::new()).await.map_err(|error| running.explain(error))
        };
        record::set_paused(&running.record, &running.paths, paused, order).await
    }
}

/// Removes everything that the engine keeps in a machine's paths.
pub(super) fn clear(paths: &VmPaths) -> Result<()> {
    super::chain::remove_place(&paths.dir.join(super::chain::PLACE))?;
    record::clear(paths)
}

/// The shape as a monitor is told it.
pub(super) fn shape(shape: Shape) -> keiki_control::Shape {
    keiki_control::Shape { vcpus: shape.vcpus.into(), memory_mib: shape.memory_mib }
}

/// A VM generation ID that no machine ever had.
pub(super) fn generation() -> [u8; 16] {
    uuid::Uuid::new_v4().into_bytes()
}

/// Asks for what is answered with something of its own; also the process that answered.
pub(super) async fn expect<T>(
    control: &Control,
    request: Request,
    files: Vec<(Role, OwnedFd)>,
    pick: impl FnOnce(Reply) -> Option<T>,
) -> Result<(T, u32)> {
    let name = request.name();
    let Answer { reply, pid } = control.ask(request, files, ANSWER).await?;
    let reply = pick(reply).ok_or_else(|| unexpected(name))?;
    Ok((reply, pid))
}

fn mac(text: &str) -> Result<[u8; 6]> {
    let bytes: Vec<_> = text.split(':').filter_map(|part| u8::from_str_radix(part, 16).ok()).collect();
    bytes.try_into().map_err(|_| EngineError::Monitor(format!("cannot have the address {text}")))
}

fn cmdline(spec: &BootSpec, tsc_khz: Option<u64>) -> String {
    let tsc = tsc_khz.map(|khz| format!(" tsc_early_khz={khz}")).unwrap_or_default();
    let quiet = "console=ttyS0 8250.nr_uarts=1 quiet panic=-1 reboot=t pci=off tsc=reliable no_timer_check";
    format!("{quiet}{tsc} {}", spec.cmdline)
}

#[cfg(test)]
mod tests {
    use super::mac;
    use keiki_protocol::net::GUEST_MAC;

    #[test]
    fn the_address_of_the_network_device_is_six_bytes() {
        assert!(mac(GUEST_MAC).is_ok());
        assert!(mac("02:00").is_err() && mac("02:00:00:00:00:zz").is_err());
    }
}
