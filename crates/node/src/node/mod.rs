//! The node: every verb of `/v1` as one method (`entry`, `verbs`).
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
mod entry;
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
    records::{Records, SandboxRecord},
    sandbox::{Live, Sandbox},
    store::Store,
};
use keiki_api::{Previews, Secret};
use keiki_types::{
    EngineKind, SandboxId, Sharing,
    api::{self, EventKind, Timings},
};
use std::{
    collections::HashMap,
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

    /// Runs a verb to its end even if its caller goes away: half a verb would leave half a machine.
    pub(super) async fn to_the_end<T: Send + 'static>(
        &self,
        verb: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // Counted first: a stop either is seen here or waits for this.
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

/// The answer to a verb that comes too late.
fn stopping() -> Error {
    Error::Busy { why: "the node is stopping".into(), retry_after: Duration::from_secs(5) }
}
