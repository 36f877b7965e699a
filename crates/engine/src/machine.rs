//! A running machine, the same for every engine. The part that differs is its [`Backend`].

use crate::{
    EngineError, FreezeReport, Frozen, Image, Machine, Result, VmPaths,
    console::tail,
    files::clear_image,
    process::{self, Watched, blocking, to_the_end},
    record::{self, AGENT, Record},
};
use async_trait::async_trait;
use keiki_sys::process::Process;
use keiki_types::{Shape, api::MemoryUse};
use serde::{Serialize, de::DeserializeOwned};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::sync::Mutex;

/// What an engine does for one running machine.
pub(crate) trait Backend: Sized + Send + Sync + 'static {
    /// What all machines of the engine share.
    type Host: Send + Sync;
    /// The engine's part of a record.
    type Part: Clone + Default + Serialize + DeserializeOwned + Send + Sync;

    /// The process of its monitor.
    fn watched(&self) -> &Watched;

    /// How the machine ended, if it has.
    fn exit_reason(&self, paths: &VmPaths) -> Option<String>;

    /// Ends its process and its background work.
    fn kill(&self) -> impl Future<Output = Result<()>> + Send;

    /// Parks the vCPUs or lets them run.
    fn set_paused(&self, paused: bool) -> impl Future<Output = Result<()>> + Send;

    /// Freezes the machine. If this fails, [`Backend::after_failed_freeze`] follows.
    fn freeze(
        vm: &Arc<Vm<Self>>,
        record: &mut Record<Self::Part>,
        image: &Image,
    ) -> impl Future<Output = Result<(Arc<dyn Frozen>, FreezeReport)>> + Send;

    /// Makes record and machine agree again.
    fn after_failed_freeze(vm: &Vm<Self>, record: &mut Record<Self::Part>)
    -> impl Future<Output = ()> + Send;

    /// Waits until the console log has what the guest wrote before it ended.
    fn console_complete(&self) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Host memory behind it. Blocks.
    fn memory(vm: &Vm<Self>) -> Result<MemoryUse>;

    /// Ends a process that was started with these paths and never recorded.
    fn end_unrecorded(paths: &VmPaths) -> impl Future<Output = Result<()>> + Send;

    /// Takes over the process of a recorded machine.
    fn attach(
        host: &Arc<Self::Host>,
        process: Arc<Process>,
        paths: &VmPaths,
        record: Record<Self::Part>,
    ) -> impl Future<Output = Result<Arc<Vm<Self>>>> + Send;

    /// Completes what an earlier process of the node left half done.
    fn reconcile(vm: &Vm<Self>, record: &mut Record<Self::Part>) -> impl Future<Output = Result<()>> + Send;
}

/// A machine that runs or is paused.
pub(crate) struct Vm<B: Backend> {
    pub(crate) host: Arc<B::Host>,
    pub(crate) paths: VmPaths,
    pub(crate) shape: Shape,
    /// Locked for the length of every change.
    pub(crate) record: Mutex<Record<B::Part>>,
    pub(crate) backend: B,
}

impl<B: Backend> Vm<B> {
    /// Saves the record: from here on the machine can be found again.
    pub(crate) fn new(
        host: &Arc<B::Host>,
        paths: &VmPaths,
        record: Record<B::Part>,
        backend: B,
    ) -> Result<Arc<Self>, (B, EngineError)> {
        if let Err(error) = record.save(paths) {
            return Err((backend, error));
        }
        let (host, paths, shape) = (Arc::clone(host), paths.clone(), record.shape);
        Ok(Arc::new(Self { host, paths, shape, record: Mutex::new(record), backend }))
    }

    /// The error, or the end of the machine if that is why.
    pub(crate) fn explain(&self, error: EngineError) -> EngineError {
        self.backend.exit_reason(&self.paths).map_or(error, EngineError::Ended)
    }

    /// The request is recorded first: after a crash, adopting the machine fulfils it.
    async fn set_paused(&self, paused: bool) -> Result<()> {
        let mut record = self.record.lock().await;
        let before = std::mem::replace(&mut record.paused, paused);
        record.save(&self.paths)?;
        let done = self.backend.set_paused(paused).await.map_err(|error| self.explain(error));
        if done.is_err() {
            record.paused = before;
            record.save(&self.paths)?;
        }
        done
    }

    async fn try_freeze(self: &Arc<Self>, image: &Image) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let mut record = self.record.lock().await;
        if image.shape != self.shape {
            return Err(EngineError::Monitor("has a different shape than the image".into()));
        }
        let frozen = B::freeze(self, &mut record, image).await;
        if frozen.is_err() {
            B::after_failed_freeze(self, &mut record).await;
            let dir = image.dir.clone();
            blocking(move || clear_image(&dir)).await?;
        }
        frozen
    }
}

#[async_trait]
impl<B: Backend> Machine for Arc<Vm<B>> {
    fn paths(&self) -> &VmPaths {
        &self.paths
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    async fn pause(&self) -> Result<()> {
        self.set_paused(true).await
    }

    async fn resume(&self) -> Result<()> {
        self.set_paused(false).await
    }

    async fn freeze(&self, image: Image) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let vm = Arc::clone(self);
        // Half of it would leave the record behind the machine, or the machine parked.
        let frozen = to_the_end(async move { vm.try_freeze(&image).await });
        frozen.await.map_err(|error| self.explain(error))
    }

    async fn stop(&self) -> Result<()> {
        // Killed before the lock is asked for: a freeze in progress fails and releases it.
        self.backend.kill().await?;
        let _record = self.record.lock().await;
        let paths = self.paths.clone();
        blocking(move || record::clear(&paths)).await
    }

    async fn ended(&self) -> String {
        self.backend.watched().wait().await;
        self.backend.console_complete().await;
        self.backend.exit_reason(&self.paths).unwrap_or_else(|| "unknown".into())
    }

    async fn memory(&self) -> Result<MemoryUse> {
        let vm = Arc::clone(self);
        blocking(move || B::memory(&vm)).await.map_err(|error| self.explain(error))
    }

    async fn cpu_time(&self) -> Result<Option<Duration>> {
        let failed = EngineError::at("read the CPU time of the monitor of", &self.paths.dir);
        self.backend.watched().process.cpu_time().map_err(failed)
    }

    fn agent_socket(&self) -> PathBuf {
        self.paths.run_dir.join(AGENT)
    }

    async fn console(&self, limit: usize) -> Vec<u8> {
        tail(&self.paths, limit)
    }
}

/// The machine with these paths, if it lives. What a dead one left is removed.
///
/// The record says what to do: a prepared VM is ended, a freeze that had switched the disk is
/// completed, one that had not is forgotten, and a machine that its user did not park runs.
pub(crate) async fn adopt<B: Backend>(
    host: &Arc<B::Host>,
    paths: &VmPaths,
) -> Result<Option<Box<dyn Machine>>> {
    let record = Record::<B::Part>::load(paths);
    if record.is_none() {
        B::end_unrecorded(paths).await?;
    }
    let process = match &record {
        Some(record) => {
            let process = Process::open(record.pid).map_err(EngineError::at("open", &paths.dir))?;
            process.filter(|process| process.start_time() == record.start_time)
        }
        None => None,
    };
    if let Some((record, process)) = record.zip(process) {
        let process = Arc::new(process);
        match take_over::<B>(host, Arc::clone(&process), paths, record).await {
            Ok(vm) => return Ok(Some(Box::new(vm))),
            Err(error) => {
                tracing::warn!(dir = %paths.dir.display(), %error, "cannot adopt a machine; ending it");
                process::end(&process).await?;
            }
        }
    }
    let paths = paths.clone();
    blocking(move || record::clear(&paths)).await.map(|()| None)
}

async fn take_over<B: Backend>(
    host: &Arc<B::Host>,
    process: Arc<Process>,
    paths: &VmPaths,
    record: Record<B::Part>,
) -> Result<Arc<Vm<B>>> {
    if record.waiting {
        return Err(EngineError::Monitor("was only prepared".into()));
    }
    let vm = B::attach(host, process, paths, record).await?;
    let mut record = vm.record.lock().await;
    B::reconcile(&vm, &mut record).await?;
    vm.backend.set_paused(record.paused).await?;
    drop(record);
    Ok(vm)
}
