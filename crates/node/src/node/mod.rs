//! The node: every verb of `/v1` as one method.
//!
//! ```text
//!   Node (what HTTP calls; verbs run to their end even if the caller goes away)
//!    └─ Inner ── records   what must survive a crash
//!             ├─ store     where it lies
//!             ├─ fleet     makes and ends machines       births.rs: reserve, prepare, thaw, commit
//!             ├─ templates baked machines                freeze.rs: the order of a freeze
//!             └─ sandboxes who is here now               start.rs, sweep.rs
//! ```

mod bake;
mod births;
mod fleet;
mod freeze;
mod observe;
mod once;
mod secrets;
mod sources;
mod stale;
mod start;
mod sweep;
mod template;
mod verbs;

use crate::{
    error::{Error, Result},
    events::{Events, event},
    locks::Locks,
    metrics::Metrics,
    once::Once,
    records::{Records, SandboxRecord, SnapshotRecord},
    sandbox::{Live, Sandbox},
    store::Store,
};
use bytes::Bytes;
use futures::stream::BoxStream;
use keiki_api::{Previews, Secret, request};
use keiki_types::{
    EngineKind, SandboxId, Sharing, SnapshotId, Status, TemplateName,
    api::{
        self, Build, BuildTemplate, CreateSandbox, EventKind, ForkSandbox, Forked, Lifecycle, Promote,
        Promoted, SetLifecycle, Snapshot, Template, Timings, Version,
    },
};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};
use tokio_util::task::TaskTracker;

/// What a node is told when it starts.
#[derive(Debug, Clone)]
pub struct Config {
    /// Everything durable.
    pub data_dir: PathBuf,
    /// Sockets.
    pub run_dir: PathBuf,
    /// Kernels and root disks made from packages; None: in the data directory. Several nodes may share one.
    pub cache_dir: Option<PathBuf>,
    /// Where users keep templates of their own, `NAME.toml` each.
    pub templates_dir: Option<PathBuf>,
    /// Address of the API, e.g. `127.0.0.1:7777`; port 0 picks a free one.
    pub listen: String,
    /// Keys that may use the API. None: any key, which is allowed on loopback only.
    pub api_keys: Vec<String>,
    /// Which engine; None probes.
    pub engine: Option<EngineKind>,
    /// Where `keiki-vmm` is, the monitor of engine `kvm`. None: it was not found.
    pub vmm_binary: Option<PathBuf>,
    /// Among whom memory may be shared at most.
    pub sharing: Sharing,
    /// Network of the slots, e.g. `10.200.0.0/16`.
    pub slot_range: String,
    /// Where the guest agent binary is; it goes into the initramfs of templates.
    pub guest_binary: PathBuf,
    /// Size of the store's own file system where one is needed, in GiB. None: half of what is free, 4 to 64.
    pub store_gib: Option<u64>,
    /// RAM that machines may use together, in MiB. None: nine tenths of the host's.
    pub memory_limit_mib: Option<u64>,
    /// Monitors started ahead for each template. Each takes a slot and some memory; a create that finds one
    /// saves its start.
    pub seats_ahead: usize,
    /// Networks that guests may reach although they are private or local, as CIDRs.
    pub egress_allow: Vec<String>,
    /// Domain of previews: port 8000 of a sandbox is at `8000-ID.SUFFIX`. Its names must lead to this node.
    pub preview_suffix: String,
    /// Name servers of the forwarder. Empty: the host's.
    pub dns: Vec<std::net::SocketAddr>,
    /// Snapshots older than this are marked as stale. None: none is.
    pub snapshot_max_age: Option<Duration>,
    /// Snapshots older than this are not restored. None: all are.
    pub snapshot_refuse_age: Option<Duration>,
    /// End every sandbox and unmount the store when the node stops.
    pub ephemeral: bool,
}

/// The daemon, without HTTP. Cheap to clone.
#[derive(Clone)]
pub struct Node {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    config: Config,
    pub(crate) records: Records,
    store: Store,
    fleet: fleet::Fleet,
    engine_version: String,
    /// No key is configured and only this host can reach the API.
    trusts_all: bool,
    pub(crate) metrics: Metrics,
    measured: observe::Measured,
    events: Events,
    pub(crate) previews: Previews,
    templates: template::Templates,
    sources: sources::Sources,
    /// What digests of named requests are made with.
    pub(crate) request_key: Secret,
    /// Named requests under way, by their keys.
    requests: Locks<String>,
    /// What must end before the node does.
    under_way: TaskTracker,
    sandboxes: RwLock<HashMap<SandboxId, Arc<Sandbox>>>,
}

impl Inner {
    pub(super) fn sandbox(&self, id: SandboxId) -> Result<Arc<Sandbox>> {
        let sandboxes = self.sandboxes.read().unwrap_or_else(PoisonError::into_inner);
        sandboxes.get(&id).cloned().ok_or_else(|| Error::NotFound(format!("no sandbox {id}")))
    }

    /// Newest first.
    fn sandboxes(&self) -> Vec<Arc<Sandbox>> {
        let sandboxes = self.sandboxes.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = sandboxes.values().cloned().collect();
        all.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.id));
        all
    }

    fn list_it(&self, sandbox: Arc<Sandbox>) {
        self.sandboxes.write().unwrap_or_else(PoisonError::into_inner).insert(sandbox.id, sandbox);
    }

    fn unlist(&self, id: SandboxId) {
        self.sandboxes.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// Lists a sandbox that is being made.
    fn announce(&self, sandbox: &Arc<Sandbox>, record: &SandboxRecord) {
        self.list_it(Arc::clone(sandbox));
        self.tell(record.id, EventKind::Created, |event| {
            event.parent_sandbox_id = record.parent_sandbox_id;
            event.snapshot_id = record.from_snapshot;
        });
    }

    /// Removes new sandboxes that did not come to be.
    async fn forget(&self, ids: &[SandboxId], why: &Error) {
        for &id in ids {
            self.unlist(id);
            self.tell(id, EventKind::Failed, |event| event.reason = Some(why.to_string()));
        }
        let keys = ids.iter().map(SandboxId::to_string).collect();
        if let Err(error) = self.records.remove::<SandboxRecord>(keys).await {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "records of a failed operation stay until restart"
            );
        }
    }

    /// Gives a sandbox its machine: from here on it can be used.
    fn adopt(self: &Arc<Self>, sandbox: &Arc<Sandbox>, record: SandboxRecord, live: Live) {
        let live = Arc::new(live);
        sandbox.set_live(Some(Arc::clone(&live)), |current| *current = record);
        self.watch(Arc::clone(sandbox), live);
    }

    /// Runs a verb to its end even if whoever asked goes away: half a verb would leave half a machine.
    pub(super) async fn to_the_end<T: Send + 'static>(
        &self,
        verb: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // Counted first: whoever stops the node either is seen here or waits for this.
        let counted = self.under_way.track_future(verb);
        if self.under_way.is_closed() {
            return Err(stopping());
        }
        tokio::spawn(counted)
            .await
            .map_err(|cause| Error::internal("the operation was interrupted", cause))?
    }

    async fn view(&self, sandbox: &Sandbox) -> api::Sandbox {
        let (memory, cpu) = match sandbox.live() {
            Some(live) => (live.machine.memory().await.ok(), live.machine.cpu_time().await.ok().flatten()),
            None => (None, None),
        };
        let cpu_ms = cpu.map(|used| u64::try_from(used.as_millis()).unwrap_or(u64::MAX));
        api::Sandbox { memory, cpu_ms, ..sandbox.view() }
    }

    /// A verb that is done: one log line with its steps, and its measures.
    fn done(&self, verb: &str, id: &str, timings: &Timings) {
        let steps: Vec<String> =
            timings.steps.iter().map(|step| format!("{}={:.1}", step.name, step.ms)).collect();
        tracing::info!(operation = verb, id, ms = timings.total_ms, steps = steps.join(" "), "done");
        self.metrics.verb(verb, timings);
    }

    /// Something happened to a sandbox.
    fn tell(&self, id: SandboxId, kind: EventKind, more: impl FnOnce(&mut api::Event)) {
        let mut event = event(id, kind);
        more(&mut event);
        self.metrics.event(kind.as_str());
        self.events.emit(event);
    }
}

/// What a verb is told that comes too late.
fn stopping() -> Error {
    Error::Busy { why: "the node is stopping".into(), retry_after: Duration::from_secs(5) }
}

impl Node {
    /// What this node is.
    #[must_use]
    pub fn version(&self) -> Version {
        Version { version: env!("CARGO_PKG_VERSION").into(), engine: self.inner.engine_version.clone() }
    }

    /// May this key (None: none was sent) use the API?
    ///
    /// # Errors
    /// 401 if not.
    pub fn authorize(&self, key: Option<&str>) -> Result<()> {
        let keys = &self.inner.config.api_keys;
        let same = |known: &String| {
            // As long for a near miss as for a far one.
            let key = key.unwrap_or_default().as_bytes();
            known.len() == key.len() && known.bytes().zip(key).fold(0, |diff, (a, b)| diff | (a ^ b)) == 0
        };
        if self.inner.trusts_all || keys.iter().any(same) { Ok(()) } else { Err(Error::Unauthorized) }
    }

    /// Makes a sandbox from a template or a snapshot.
    ///
    /// # Errors
    /// 400, 404, 503 while the template is being built, 507; 409 and 422 for a named request.
    pub async fn create(&self, request: CreateSandbox, once: Option<Once>) -> Result<api::Sandbox> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.create_once(request, once).await }).await
    }

    /// Newest first. `memory`: fill in memory use.
    ///
    /// # Errors
    /// None so far.
    pub async fn list(&self, memory: bool) -> Result<Vec<api::Sandbox>> {
        let sandboxes = self.inner.sandboxes();
        if memory {
            Ok(futures::future::join_all(sandboxes.iter().map(|sandbox| self.inner.view(sandbox))).await)
        } else {
            Ok(sandboxes.iter().map(|sandbox| sandbox.view()).collect())
        }
    }

    /// One sandbox, with its memory use.
    ///
    /// # Errors
    /// 404.
    pub async fn get(&self, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.inner.sandbox(id)?;
        Ok(self.inner.view(&sandbox).await)
    }

    /// Ends a sandbox for ever.
    ///
    /// # Errors
    /// 404, 409.
    pub async fn delete(&self, id: SandboxId) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.delete(id).await }).await
    }

    /// Branches children off a sandbox, all or none. They have these labels beside the request's or the parent's.
    ///
    /// # Errors
    /// 400, 404, 409, 507; 422 for a named request.
    pub async fn fork(
        &self,
        id: SandboxId,
        request: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<Once>,
    ) -> Result<Forked> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.fork_once(id, request, labels, once).await }).await
    }

    /// Keeps one child of a fork-tree.
    ///
    /// # Errors
    /// 400, 404.
    pub async fn promote(&self, id: SandboxId, request: Promote) -> Result<Promoted> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.promote(id, request).await }).await
    }

    /// Parks its vCPUs.
    ///
    /// # Errors
    /// 404, 409.
    pub async fn pause(&self, id: SandboxId) -> Result<api::Sandbox> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.pause(id).await }).await
    }

    /// Lets them run.
    ///
    /// # Errors
    /// 404, 409.
    pub async fn resume(&self, id: SandboxId) -> Result<api::Sandbox> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.resume(id).await }).await
    }

    /// Writes it out and frees its RAM and slot; the id stays.
    ///
    /// # Errors
    /// 404, 409, 507.
    pub async fn hibernate(&self, id: SandboxId) -> Result<api::Sandbox> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.hibernate(id).await }).await
    }

    /// Brings it back.
    ///
    /// # Errors
    /// 404, 409, 507.
    pub async fn wake(&self, id: SandboxId) -> Result<api::Sandbox> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.wake(id).await }).await
    }

    /// TTL and idleness. Asking is no activity.
    ///
    /// # Errors
    /// 404.
    #[allow(clippy::unused_async)] // like its siblings
    pub async fn lifecycle(&self, id: SandboxId) -> Result<Lifecycle> {
        let view = self.inner.sandbox(id)?.view();
        Ok(Lifecycle {
            ttl_seconds: view.ttl_seconds,
            persistent: view.persistent,
            idle_seconds: view.idle_seconds,
        })
    }

    /// Changes TTL or persistence, and starts the clock anew.
    ///
    /// # Errors
    /// 400, 404.
    pub async fn set_lifecycle(&self, id: SandboxId, request: SetLifecycle) -> Result<Lifecycle> {
        let sandbox = self.inner.sandbox(id)?;
        let verb = sandbox.verb.lock().await;
        let current = sandbox.record();
        if matches!(current.status, Status::Stopping | Status::Deleted) {
            return Err(Error::NotFound(format!("no sandbox {id}")));
        }
        if current.status == Status::Creating {
            return Err(Error::Conflict(format!("sandbox {id} is still being created")));
        }
        let ttl_seconds = request::ttl(request.ttl_seconds, current.ttl_seconds)?;
        let record = sandbox.update(|record| {
            record.ttl_seconds = ttl_seconds;
            record.persistent = request.persistent.unwrap_or(record.persistent);
        });
        sandbox.touch();
        self.inner.records.put(vec![record]).await?;
        drop(verb);
        self.lifecycle(id).await
    }

    /// The last `limit` bytes of the guest's console; of a machine that ended by itself, what it said at its end.
    ///
    /// # Errors
    /// 404.
    pub async fn console(&self, id: SandboxId, limit: usize) -> Result<Bytes> {
        let sandbox = self.inner.sandbox(id)?;
        match sandbox.live() {
            Some(live) => Ok(live.machine.console(limit).await.into()),
            None => Ok(crate::sandbox::console_of(&sandbox.record()).unwrap_or_default().into()),
        }
    }

    /// Takes a snapshot; the sandbox goes on.
    ///
    /// # Errors
    /// 404, 409, 507; 422 for a named request.
    pub async fn snapshot(&self, id: SandboxId, once: Option<Once>) -> Result<Snapshot> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.snapshot_once(id, once).await }).await
    }

    /// Newest first.
    ///
    /// # Errors
    /// 500.
    pub async fn snapshots(&self, of: Option<SandboxId>) -> Result<Vec<Snapshot>> {
        let mut records = self.inner.records.all::<SnapshotRecord>().await?;
        records.retain(|record| of.is_none_or(|id| record.sandbox_id == id));
        records.sort_by_key(|record| std::cmp::Reverse(record.id));
        Ok(records.iter().map(|record| self.inner.snapshot_view(record)).collect())
    }

    /// One snapshot.
    ///
    /// # Errors
    /// 404.
    pub async fn get_snapshot(&self, id: SnapshotId) -> Result<Snapshot> {
        Ok(self.inner.snapshot_view(&self.inner.snapshot_record(id).await?))
    }

    /// Deletes a snapshot. What was restored from it lives on.
    ///
    /// # Errors
    /// 404.
    pub async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        self.inner.to_the_end(async move { inner.delete_snapshot(id).await }).await
    }

    /// All templates, built or not.
    ///
    /// # Errors
    /// 500.
    pub async fn templates(&self) -> Result<Vec<Template>> {
        self.inner.templates_view().await
    }

    /// One template.
    ///
    /// # Errors
    /// 404.
    pub async fn get_template(&self, name: &TemplateName) -> Result<Template> {
        let all = self.inner.templates_view().await?;
        let found = all.into_iter().find(|template| template.name == name.as_str());
        found.ok_or_else(|| Error::NotFound(format!("no template {name}")))
    }

    /// Removes a baked template; sandboxes and snapshots made from it live on.
    ///
    /// # Errors
    /// 404, 409 while it is being built.
    pub async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        let (inner, name) = (Arc::clone(&self.inner), name.clone());
        self.inner.to_the_end(async move { inner.delete_template(&name).await }).await
    }

    /// Starts a build, or returns the one that is running for this template.
    ///
    /// # Errors
    /// 400, 404.
    pub async fn build_template(&self, request: BuildTemplate) -> Result<Build> {
        self.inner.build_template(request).await
    }

    /// Builds since the node started, newest first.
    ///
    /// # Errors
    /// None so far.
    #[allow(clippy::unused_async)] // like its siblings
    pub async fn builds(&self) -> Result<Vec<Build>> {
        Ok(self.inner.templates.builds())
    }

    /// One build.
    ///
    /// # Errors
    /// 404.
    #[allow(clippy::unused_async)] // like its siblings
    pub async fn get_build(&self, id: &str) -> Result<Build> {
        let builds = self.inner.templates.builds();
        builds
            .into_iter()
            .find(|build| build.id == id)
            .ok_or_else(|| Error::NotFound(format!("no build {id}")))
    }

    /// Log lines of a build, from its start to its end.
    ///
    /// # Errors
    /// 404.
    #[allow(clippy::unused_async)] // like its siblings
    pub async fn build_log(&self, id: &str) -> Result<BoxStream<'static, String>> {
        self.inner.templates.log(id).ok_or_else(|| Error::NotFound(format!("no build {id}")))
    }
}
