//! The daemon: every verb of `/v1` as one method.
//!
//! ```text
//!   Node (called by HTTP; verbs run to their end even if the caller disconnects)
//!    └─ Inner ── sandboxes   which there are, and what may be done to one when (sandbox.rs, lifecycle.rs)
//!             ├─ fleet       makes and ends machines: the engine, network slots, room
//!             ├─ journal     records, events, metrics
//!             ├─ templates   baked machines, and VMs prepared ahead
//!             └─ store       where everything lies
//! ```

use crate::{
    config::Config,
    error::{Error, Result},
    fleet::Fleet,
    journal::Journal,
    locks::Locks,
    memory::Measured,
    records::SandboxRecord,
    sandbox::{Live, Sandbox},
    sandboxes::Sandboxes,
    store::Store,
    templates::Templates,
};
use keiki_api::{Previews, Secret};
use keiki_types::api;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio_util::task::TaskTracker;

/// The daemon, without HTTP. Cheap to clone.
#[derive(Clone)]
pub struct Node {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub config: Config,
    pub store: Store,
    /// Makes and ends machines.
    pub fleet: Fleet,
    pub journal: Journal,
    pub sandboxes: Sandboxes,
    pub templates: Templates,
    /// Directories that machines are thawed from: one that is being read is not removed. Removing a
    /// snapshot or a template version first removes its name, so that no new user finds it, then
    /// claims the directory. A running machine no longer needs it: it has hard links.
    pub sources: Locks<PathBuf>,
    pub previews: Previews,
    pub measured: Measured,
    pub engine_version: String,
    /// No key is configured and only this host can reach the API.
    pub trusts_all: bool,
    /// The key for digests of named requests.
    pub request_key: Secret,
    /// Named requests in progress, by their keys.
    pub requests: Locks<String>,
    /// What must end before the node does.
    pub under_way: TaskTracker,
}

impl Inner {
    /// Gives a sandbox its machine: from here on it can be used. Announces it before the machine is
    /// watched, so its end is reported later.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        record: SandboxRecord,
        live: Live,
        announce: impl FnOnce(),
    ) {
        let live = Arc::new(live);
        sandbox.set_live(Some(Arc::clone(&live)), |current| *current = record);
        announce();
        self.watch(Arc::clone(sandbox), live);
    }

    /// Runs a verb to its end even if its caller disconnects: half a verb would leave half a
    /// machine.
    pub(crate) async fn to_the_end<T: Send + 'static>(
        &self,
        verb: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        // Counted first: a stop of the node is either seen here or waits for this.
        let counted = self.under_way.track_future(verb);
        if self.under_way.is_closed() {
            return Err(stopping());
        }
        tokio::spawn(counted)
            .await
            .map_err(|cause| Error::internal("the operation was interrupted", cause))?
    }

    pub(crate) async fn view(&self, sandbox: &Sandbox) -> api::Sandbox {
        let (memory, cpu) = match sandbox.live() {
            Some(live) => (live.machine.memory().await.ok(), live.machine.cpu_time().await.ok().flatten()),
            None => (None, None),
        };
        let cpu_ms = cpu.map(|used| u64::try_from(used.as_millis()).unwrap_or(u64::MAX));
        api::Sandbox { memory, cpu_ms, ..sandbox.view() }
    }
}

/// The error of a verb that comes too late.
pub(crate) fn stopping() -> Error {
    Error::Busy { why: "the node is stopping".into(), retry_after: Duration::from_secs(5) }
}
