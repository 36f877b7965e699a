//! An engine without guests: machines are directories and sockets. For tests of the layers above an
//! engine.
//!
//! Files are real: a boot, a freeze and a snapshot leave in their directories what the other
//! engines leave there. Each call can be made to [fail](FakeEngine::fail) or to [take
//! long](FakeEngine::delay), a machine can [end](FakeEngine::end), and [a later process of the
//! node](FakeEngine::restarted) adopts the machines that are left. The test supplies the agent that
//! answers on the agent port.

use crate::{
    BootSpec, Capabilities, Engine, EngineError, FreezeReport, Frozen, Image, Machine, PreparedVm, Result,
    VmPaths, console,
    files::{clear_image, make_memory, manifest, open_snapshot, persist},
    fsutil::link,
    layers::{layer_path, link_layers, make_layers_dir, new_name},
    prepared::Waiting,
    process::Task,
    record::{self, AGENT, Layer, or_clear},
};
use async_trait::async_trait;
use keiki_snapshot::{Format, MEMORY_FILE, Made, Manifest, STATE_FILE, State};
use keiki_sys::stopwatch::{Steps, Stopwatch};
use keiki_types::{EngineKind, Shape, Sharing, api::MemoryUse};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::Duration,
};
use tokio::{net::UnixListener, sync::watch};

/// What can fail or take long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    Boot,
    Image,
    Prepare,
    Load,
    Adopt,
    Pause,
    Resume,
    Freeze,
    Thaw,
    Persist,
    Stop,
    Memory,
}

/// What answers on the agent port of a machine, as long as that runs.
pub type Agent = Arc<dyn Fn(UnixListener) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// The engine. Clones are the same one.
#[derive(Clone)]
pub struct FakeEngine(Arc<Inner>);

struct Inner {
    agent: Agent,
    faults: Mutex<HashMap<Call, Fault>>,
    calls: Mutex<Vec<Call>>,
    /// By directory. Shared by the engines of all processes of the node.
    running: Arc<Mutex<HashMap<PathBuf, Arc<Running>>>>,
}

#[derive(Default)]
struct Fault {
    delay: Duration,
    /// How many calls go well before one fails.
    fails_after: Option<usize>,
}

struct Running {
    paths: VmPaths,
    shape: Shape,
    bottom: Layer,
    paused: Mutex<bool>,
    ended: watch::Sender<Option<String>>,
    agent: Mutex<Option<Task>>,
}

impl FakeEngine {
    /// An engine whose machines have this agent.
    #[must_use]
    pub fn new(agent: Agent) -> Self {
        let (faults, calls, running) = Default::default();
        Self(Arc::new(Inner { agent, faults, calls, running }))
    }

    /// The engine of a later process of the node, which has still to adopt the machines.
    #[must_use]
    pub fn restarted(&self) -> Self {
        let (agent, running) = (Arc::clone(&self.0.agent), Arc::clone(&self.0.running));
        let (faults, calls) = Default::default();
        Self(Arc::new(Inner { agent, faults, calls, running }))
    }

    /// After `after` more calls of this kind, one fails.
    pub fn fail(&self, call: Call, after: usize) {
        self.0.faults.lock().entry(call).or_default().fails_after = Some(after);
    }

    /// Calls of this kind take this long from now on.
    pub fn delay(&self, call: Call, delay: Duration) {
        self.0.faults.lock().entry(call).or_default().delay = delay;
    }

    /// The calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.0.calls.lock().clone()
    }

    /// Directories of the machines that run.
    #[must_use]
    pub fn running(&self) -> Vec<PathBuf> {
        self.0.running.lock().keys().cloned().collect()
    }

    /// Ends the machine of this directory, as if its guest had. False: there is none.
    #[must_use]
    pub fn end(&self, dir: &Path, how: &str) -> bool {
        self.0.end(dir, how)
    }
}

impl Inner {
    async fn call(&self, call: Call) -> Result<()> {
        self.calls.lock().push(call);
        let (delay, fails) = match self.faults.lock().get_mut(&call) {
            None => return Ok(()),
            Some(fault) => {
                let fails = fault.fails_after == Some(0);
                fault.fails_after = fault.fails_after.and_then(|after| after.checked_sub(1));
                (fault.delay, fails)
            }
        };
        tokio::time::sleep(delay).await;
        if fails { Err(EngineError::Monitor(format!("was made to fail at {call:?}"))) } else { Ok(()) }
    }

    /// A machine over the files that are in its directory.
    fn start(self: &Arc<Self>, paths: &VmPaths, shape: Shape, bottom: Layer) -> Result<Box<dyn Machine>> {
        let socket = paths.run_dir.join(AGENT);
        let listener = UnixListener::bind(&socket).map_err(EngineError::at("listen at", &socket))?;
        let agent = Task(tokio::spawn((self.agent)(listener)));
        let [log, _] = console::files(paths);
        fs::write(&log, "fake: it runs\n").map_err(EngineError::at("write", &log))?;
        let running = Arc::new(Running {
            paths: paths.clone(),
            shape,
            bottom,
            paused: Mutex::new(false),
            ended: watch::Sender::new(None),
            agent: Mutex::new(Some(agent)),
        });
        self.running.lock().insert(paths.dir.clone(), Arc::clone(&running));
        Ok(Box::new(FakeMachine { engine: Arc::clone(self), running }))
    }

    fn end(&self, dir: &Path, how: &str) -> bool {
        let Some(running) = self.running.lock().remove(dir) else { return false };
        *running.agent.lock() = None;
        running.ended.send_replace(Some(how.to_owned()));
        true
    }
}

fn made(_: Shape) -> Made {
    Made { engine: EngineKind::Kvm, version: "fake".into(), machine: "fake".into() }
}

#[async_trait]
impl Engine for FakeEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Kvm
    }

    async fn probe(&self) -> Capabilities {
        let (version, note) = ("fake".into(), "runs no guests".into());
        Capabilities { kind: EngineKind::Kvm, usable: true, version, note }
    }

    async fn boot(&self, spec: &BootSpec, paths: VmPaths) -> Result<Box<dyn Machine>> {
        let boot = async {
            self.0.call(Call::Boot).await?;
            make_layers_dir(&paths.dir)?;
            make_memory(&paths.dir, spec.shape)?;
            let bottom = Layer { name: new_name(Format::Raw), format: Format::Raw };
            let layer = layer_path(&paths.dir, &bottom.name);
            fs::write(&layer, "disk").map_err(EngineError::at("write", &layer))?;
            crate::users::chmod_readable(&layer)?;
            self.0.start(&paths, spec.shape, bottom)
        };
        or_clear(&paths, boot).await
    }

    async fn image(&self, dir: &Path, shape: Shape) -> Result<Image> {
        self.0.call(Call::Image).await?;
        Ok(Image { dir: dir.to_owned(), shape, alone: false })
    }

    async fn prepare(&self, image: &Image, paths: VmPaths) -> Result<PreparedVm> {
        let prepare = async {
            self.0.call(Call::Prepare).await?;
            make_layers_dir(&paths.dir)
        };
        or_clear(&paths, prepare).await?;
        Ok(PreparedVm::new(image, paths, Waiting::Fake))
    }

    async fn load(&self, dir: &Path, sharing: Sharing) -> Result<Arc<dyn Frozen>> {
        self.0.call(Call::Load).await?;
        let manifest = open_snapshot(dir, made)?;
        let image = Image { dir: dir.to_owned(), shape: manifest.shape, alone: sharing == Sharing::None };
        Ok(Arc::new(FakeFrozen { engine: Arc::clone(&self.0), image, manifest }))
    }

    async fn adopt(&self, paths: &VmPaths) -> Result<Option<Box<dyn Machine>>> {
        self.0.call(Call::Adopt).await?;
        let running = self.0.running.lock().get(&paths.dir).cloned();
        match running {
            Some(running) => Ok(Some(Box::new(FakeMachine { engine: Arc::clone(&self.0), running }))),
            None => record::clear(paths).map(|()| None),
        }
    }

    async fn close(&self) {}
}

struct FakeMachine {
    engine: Arc<Inner>,
    running: Arc<Running>,
}

impl FakeMachine {
    /// A call that only a machine which runs can answer.
    async fn call(&self, call: Call) -> Result<()> {
        let called = self.engine.call(call).await;
        match self.running.ended.borrow().clone() {
            Some(how) => Err(EngineError::Ended(how)),
            None => called,
        }
    }

    fn take(&self, image: &Image) -> Result<Manifest> {
        let Running { paths, shape, bottom, .. } = &*self.running;
        make_memory(&image.dir, *shape)?;
        let state = image.dir.join(STATE_FILE);
        fs::write(&state, "state").map_err(EngineError::at("write", &state))?;
        let layers = link_layers(&paths.dir, &image.dir, std::slice::from_ref(bottom), shape.disk_mib)?;
        let state = State { bytes: 5, blake3: blake3::hash(b"state").to_hex().to_string() };
        Ok(manifest(made(*shape), *shape, state, layers))
    }
}

#[async_trait]
impl Machine for FakeMachine {
    fn paths(&self) -> &VmPaths {
        &self.running.paths
    }

    fn shape(&self) -> Shape {
        self.running.shape
    }

    async fn pause(&self) -> Result<()> {
        self.call(Call::Pause).await?;
        *self.running.paused.lock() = true;
        Ok(())
    }

    async fn resume(&self) -> Result<()> {
        self.call(Call::Resume).await?;
        *self.running.paused.lock() = false;
        Ok(())
    }

    async fn freeze(&self, image: Image) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let mut watch = Stopwatch::start();
        let frozen = self.call(Call::Freeze).await.and_then(|()| self.take(&image));
        let manifest = match frozen {
            Ok(manifest) => manifest,
            Err(error) => {
                clear_image(&image.dir)?;
                return Err(error);
            }
        };
        let vcpu_pause = watch.lap("freeze");
        let frozen = FakeFrozen { engine: Arc::clone(&self.engine), image, manifest };
        Ok((Arc::new(frozen), FreezeReport { vcpu_pause, steps: watch.into_steps() }))
    }

    async fn stop(&self) -> Result<()> {
        self.engine.call(Call::Stop).await?;
        self.engine.end(&self.running.paths.dir, "stopped");
        record::clear(&self.running.paths)
    }

    async fn ended(&self) -> String {
        let mut ended = self.running.ended.subscribe();
        let how = ended.wait_for(Option::is_some).await.map(|how| how.clone());
        how.ok().flatten().unwrap_or_else(|| "unknown".into())
    }

    async fn memory(&self) -> Result<MemoryUse> {
        self.call(Call::Memory).await?;
        let guest_bytes = u64::from(self.running.shape.memory_mib) << 20;
        Ok(MemoryUse { guest_bytes, rss_bytes: 0, pss_bytes: 0, private_bytes: 0, shared_bytes: 0 })
    }

    async fn cpu_time(&self) -> Result<Option<Duration>> {
        Ok(self.running.ended.borrow().is_none().then_some(Duration::ZERO))
    }

    fn agent_socket(&self) -> PathBuf {
        self.running.paths.run_dir.join(AGENT)
    }

    async fn console(&self, limit: usize) -> Vec<u8> {
        console::tail(&self.running.paths, limit)
    }
}

struct FakeFrozen {
    engine: Arc<Inner>,
    image: Image,
    manifest: Manifest,
}

#[async_trait]
impl Frozen for FakeFrozen {
    fn image(&self) -> &Image {
        &self.image
    }

    async fn thaw(&self, prepared: PreparedVm) -> Result<(Box<dyn Machine>, Steps)> {
        let mut watch = Stopwatch::start();
        let (paths, ()) = prepared.take(&self.image, |waiting| match waiting {
            Waiting::Fake => Ok(()),
            other => Err(other),
        })?;
        let thaw = async {
            self.engine.call(Call::Thaw).await?;
            link(&self.image.dir.join(MEMORY_FILE), &paths.dir.join(MEMORY_FILE))?;
            let layers = self.manifest.layers.iter();
            let layers: Vec<_> =
                layers.map(|layer| Layer { name: layer.name.clone(), format: layer.format }).collect();
            link_layers(&self.image.dir, &paths.dir, &layers, self.image.shape.disk_mib)?;
            let bottom = layers.into_iter().next();
            let bottom = bottom.ok_or_else(|| EngineError::Monitor("has no disk".into()))?;
            self.engine.start(&paths, self.image.shape, bottom)
        };
        let machine = or_clear(&paths, thaw).await?;
        watch.lap("run");
        Ok((machine, watch.into_steps()))
    }

    async fn persist(&self) -> Result<Manifest> {
        self.engine.call(Call::Persist).await?;
        persist(&self.image.dir, self.manifest.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::{Agent, Call, FakeEngine};
    use crate::{BootSpec, Engine, EngineError, VmPaths};
    use keiki_types::{Shape, Sharing};
    use std::{error::Error, fs, path::Path, sync::Arc, time::Duration};
    use tokio::net::UnixStream;

    const SHAPE: Shape = Shape { vcpus: 1, memory_mib: 16, disk_mib: 16 };

    fn engine() -> FakeEngine {
        let agent: Agent = Arc::new(|listener| {
            Box::pin(async move {
                let _held = listener.accept().await;
                std::future::pending().await
            })
        });
        FakeEngine::new(agent)
    }

    fn paths(dir: &Path, name: &str) -> std::io::Result<VmPaths> {
        let dir = dir.join(name);
        let run_dir = dir.join("run");
        fs::create_dir_all(&run_dir)?;
        Ok(VmPaths { dir, run_dir, netns: None })
    }

    fn spec() -> BootSpec {
        let (kernel, initrd, disk) = Default::default();
        BootSpec { shape: SHAPE, kernel, initrd, disk, cmdline: String::new() }
    }

    /// Entries beside the run directory.
    fn left(paths: &VmPaths) -> std::io::Result<usize> {
        Ok(fs::read_dir(&paths.dir)?.count() - 1 + fs::read_dir(&paths.run_dir)?.count())
    }

    #[tokio::test]
    async fn a_machine_is_frozen_stored_loaded_and_adopted() -> Result<(), Box<dyn Error>> {
        let (dir, engine) = (tempfile::tempdir()?, engine());
        let [one, two] = [paths(dir.path(), "one")?, paths(dir.path(), "two")?];
        let machine = engine.boot(&spec(), one.clone()).await?;
        let store = dir.path().join("frozen");
        fs::create_dir(&store)?;
        let (frozen, _) = machine.freeze(engine.image(&store, SHAPE).await?).await?;
        let manifest = frozen.persist().await?;
        assert_eq!(keiki_snapshot::open(&store)?, manifest);
        let loaded = engine.load(&store, Sharing::Node).await?;
        let (copy, _) = loaded.thaw(engine.prepare(loaded.image(), two.clone()).await?).await?;
        UnixStream::connect(copy.agent_socket()).await?;
        let later = engine.restarted();
        let adopted = later.adopt(&two).await?.ok_or("not found")?;
        assert!(later.end(&two.dir, "guest-reset") && !later.end(&two.dir, "again"));
        assert_eq!(
            (adopted.ended().await.as_str(), copy.ended().await.as_str()),
            ("guest-reset", "guest-reset")
        );
        assert!(matches!(copy.pause().await, Err(EngineError::Ended(_))));
        assert!(later.adopt(&two).await?.is_none());
        machine.stop().await?;
        assert_eq!((left(&one)?, left(&two)?, engine.running().len()), (0, 0, 0));
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_made_to_fail_leaves_nothing() -> Result<(), Box<dyn Error>> {
        let (dir, engine) = (tempfile::tempdir()?, engine());
        let [one, two] = [paths(dir.path(), "one")?, paths(dir.path(), "two")?];
        engine.fail(Call::Boot, 0);
        assert!(engine.boot(&spec(), one.clone()).await.is_err());
        assert_eq!(left(&one)?, 0);
        let machine = engine.boot(&spec(), one.clone()).await?;
        let store = dir.path().join("frozen");
        fs::create_dir(&store)?;
        let image = engine.image(&store, SHAPE).await?;
        engine.fail(Call::Freeze, 0);
        assert!(machine.freeze(image.clone()).await.is_err());
        assert_eq!(fs::read_dir(&store)?.count(), 0);
        let (frozen, _) = machine.freeze(image.clone()).await?;
        engine.delay(Call::Thaw, Duration::from_secs(60));
        engine.fail(Call::Thaw, 1);
        let began = tokio::time::Instant::now();
        let (copy, _) = frozen.thaw(engine.prepare(&image, two.clone()).await?).await?;
        assert!(began.elapsed() >= Duration::from_secs(60));
        copy.stop().await?;
        assert!(frozen.thaw(engine.prepare(&image, two.clone()).await?).await.is_err());
        drop(engine.prepare(&image, two.clone()).await?);
        assert_eq!(left(&two)?, 0);
        Ok(())
    }
}
