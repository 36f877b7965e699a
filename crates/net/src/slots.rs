//! The pool: slots are built ahead, taken, adopted and given back.

use crate::{
    cidr::Cidr,
    dns::{Server, Upstream},
    error::{Error, Result},
    host,
    netlink::Net,
    range::{NodeTag, Range},
    rules::EgressPolicy,
    slot::{Origin, Plan},
};
use keiki_sys::netns;
use parking_lot::Mutex;
use std::{
    collections::{BTreeSet, VecDeque},
    fs::File,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore, oneshot},
    task::JoinSet,
};

/// Slots built at once: more would only wait for the kernel's network lock.
const BUILDERS: usize = 2;
/// How long to wait after a build ahead has failed.
const RETRY: Duration = Duration::from_secs(5);
/// How often to check the host side.
const MEND: Duration = Duration::from_secs(2);

/// Configuration of a node's slots.
#[derive(Debug, Clone)]
pub struct SlotsConfig {
    /// Where their outside addresses come from, a /30 each, such as `10.200.0.0/16`.
    pub range: Cidr,
    /// How many slots to build ahead.
    pub ahead: usize,
    /// A directory of this node, for a lock file.
    pub state_dir: PathBuf,
    /// Tells this node's slots from those of other nodes on the host. It must survive a restart.
    pub node_tag: NodeTag,
    /// Resolvers behind the slots' name servers. None: those in the host's resolv.conf at the time
    /// of a query.
    pub upstream: Option<Vec<SocketAddr>>,
    /// What guests may reach.
    pub egress: EgressPolicy,
}

/// The slots of a node. Dropping this leaves everything as it is, as a crash would; the next
/// [`Slots::start`] cleans up.
#[derive(Debug)]
pub struct Slots {
    inner: Arc<Inner>,
    /// Tasks that end with this.
    background: Mutex<JoinSet<()>>,
}

/// The network of one sandbox. Dropping it ends its name server but leaves its namespace for
/// [`Slots::adopt`]; [`Slots::give_back`] removes it.
#[derive(Debug)]
pub struct Slot {
    index: u16,
    netns: PathBuf,
    outside: Ipv4Addr,
    names: Server,
}

impl Slot {
    /// Its number: record it, and pass it to [`Slots::adopt`].
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Its namespace, such as `/run/netns/keiki-1a2b-7`.
    #[must_use]
    pub fn netns_path(&self) -> PathBuf {
        self.netns.clone()
    }

    /// The address of its sandbox as the host sees it.
    #[must_use]
    pub fn outside(&self) -> Ipv4Addr {
        self.outside
    }
}

struct Inner {
    plan: Plan,
    ahead: usize,
    upstream: Arc<Upstream>,
    host: Net,
    state: Mutex<State>,
    wanted: Notify,
    builders: Semaphore,
    /// Held as long as this lives.
    _lock: File,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Slot>,
    used: BTreeSet<u16>,
    /// Where to look for the next free index: the one freed last is used last.
    cursor: u16,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl Slots {
    /// Prepares the host, removes slots of an earlier run that are not `in_use`, and starts
    /// building ahead. Slots in use wait for [`Slots::adopt`]; their indexes are not given to
    /// others.
    pub async fn start(config: SlotsConfig, in_use: &[u16]) -> Result<Self> {
        let range = Range::new(config.range)?;
        if let Some(index) = in_use.iter().find(|index| u32::from(**index) >= range.slots()) {
            return Err(Error::Taken(*index));
        }
        let lock = host::lock(&config.state_dir).await?;
        let upstream = Arc::new(Upstream::new(config.upstream));
        let plan = Plan { tag: config.node_tag, range, egress: config.egress };
        let used: BTreeSet<u16> = in_use.iter().copied().collect();
        let host = Net::open()?;
        host::prepare(&plan, &host, &used, &upstream.resolvers().await).await?;
        let inner = Arc::new(Inner {
            plan,
            ahead: config.ahead,
            upstream,
            host,
            state: Mutex::new(State { used, ..State::default() }),
            wanted: Notify::new(),
            builders: Semaphore::new(BUILDERS),
            _lock: lock,
        });
        let mut background = JoinSet::new();
        background.spawn(refill(Arc::clone(&inner)));
        background.spawn(guard(Arc::clone(&inner)));
        Ok(Self { inner, background: Mutex::new(background) })
    }

    /// A slot for a new sandbox: at once if one is ready, else it is built now.
    pub async fn take(&self) -> Result<Slot> {
        let ready = self.inner.state.lock().ready.pop_front();
        self.inner.wanted.notify_one();
        match ready {
            Some(slot) => Ok(slot),
            None => self.inner.build_new().await,
        }
    }

    /// Number of slots that are ready.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.inner.state.lock().ready.len()
    }

    /// Number of slots taken, without those that are ready.
    #[must_use]
    pub fn used(&self) -> usize {
        let state = self.inner.state.lock();
        state.used.len().saturating_sub(state.ready.len())
    }

    /// The slot of a machine that was running when the node last stopped. What is missing is made
    /// again, and its name server is started. Its index was in `in_use` at [`Slots::start`].
    pub async fn adopt(&self, index: u16) -> Result<Slot> {
        if !self.inner.state.lock().used.contains(&index) {
            return Err(Error::Taken(index));
        }
        self.inner.build(index, Origin::Adopted).await
    }

    /// Removes a slot whose machine has ended, with everything its user left in it.
    pub async fn give_back(&self, slot: Slot) {
        let inner = Arc::clone(&self.inner);
        // Runs to its end even if the caller goes away.
        let done = tokio::spawn(async move {
            let index = slot.index;
            slot.names.stop().await;
            inner.free(index).await;
        });
        let _ = done.await;
    }

    /// Stops the pool and removes all slots that are not in `keep`, and everything on the host if
    /// `keep` is empty. Slots in `keep` have no name server until the next start adopts them.
    pub async fn stop(&self, keep: &[u16]) {
        let mut background = std::mem::take(&mut *self.background.lock());
        background.shutdown().await;
        // Waits for builds under way, whose slots are in `used`; no other build begins.
        let _all = self.inner.builders.acquire_many(BUILDERS as u32).await;
        self.inner.builders.close();
        let ready = std::mem::take(&mut self.inner.state.lock().ready);
        for slot in ready {
            slot.names.stop().await;
        }
        let gone: Vec<u16> =
            self.inner.state.lock().used.iter().copied().filter(|index| !keep.contains(index)).collect();
        for index in gone {
            self.inner.free(index).await;
        }
        if keep.is_empty()
            && let Err(error) = host::clear(&self.inner.plan, &self.inner.host).await
        {
            warn("the host's firewall rules could not be removed", &error);
        }
    }
}

impl Inner {
    /// Runs to its end even if the caller goes away: a build cut short would leave half a slot. The
    /// slot is then ready for another caller.
    async fn build_new(self: &Arc<Self>) -> Result<Slot> {
        let index = self.state.lock().reserve(self.plan.range.slots())?;
        let (done, slot) = oneshot::channel();
        let this = Arc::clone(self);
        tokio::spawn(async move {
            let built = this.build(index, Origin::New).await;
            if built.is_err() {
                this.state.lock().used.remove(&index);
            }
            if let Err(Ok(slot)) = done.send(built) {
                this.state.lock().ready.push_back(slot);
            }
        });
        slot.await.unwrap_or(Err(Error::Stopped))
    }

    async fn build(self: &Arc<Self>, index: u16, origin: Origin) -> Result<Slot> {
        let _permit = self.builders.acquire().await.map_err(|_| Error::Stopped)?;
        let this = Arc::clone(self);
        let sockets = tokio::task::spawn_blocking(move || this.plan.build(index, origin))
            .await
            .map_err(|error| Error::io("build a slot")(error.into()))??;
        Ok(Slot {
            index,
            netns: netns::path(&self.plan.tag.netns(index)),
            outside: self.plan.range.slot_end(index),
            names: Server::start(index, sockets, Arc::clone(&self.upstream))?,
        })
    }

    /// A slot that cannot be removed keeps its index until the next start.
    async fn free(&self, index: u16) {
        match self.plan.take_down(&self.host, index).await {
            Ok(()) => {
                self.state.lock().used.remove(&index);
            }
            Err(error) => warn("a slot could not be removed", &error),
        }
    }
}

impl State {
    fn reserve(&mut self, slots: u32) -> Result<u16> {
        let indexes = 0..=u16::try_from(slots - 1).unwrap_or(u16::MAX);
        let cursor = self.cursor;
        let free = indexes
            .clone()
            .skip_while(|index| *index < cursor)
            .chain(indexes.clone())
            .find(|index| !self.used.contains(index))
            .ok_or(Error::Exhausted(slots))?;
        self.used.insert(free);
        self.cursor = free.checked_add(1).filter(|next| indexes.contains(next)).unwrap_or(0);
        Ok(free)
    }
}

async fn refill(inner: Arc<Inner>) {
    loop {
        if inner.state.lock().ready.len() >= inner.ahead {
            inner.wanted.notified().await;
            continue;
        }
        match inner.build_new().await {
            Ok(slot) => inner.state.lock().ready.push_back(slot),
            Err(error) => {
                warn("a slot could not be built ahead", &error);
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

async fn guard(inner: Arc<Inner>) {
    let mut failing = false;
    loop {
        tokio::time::sleep(MEND).await;
        let mended = host::mend(&inner.plan, &inner.host).await;
        // Logged once, not every time.
        if let Err(error) = &mended
            && !failing
        {
            warn("the host side of the slots could not be checked", error);
        }
        failing = mended.is_err();
    }
}

fn warn(what: &str, error: &Error) {
    tracing::warn!(error = error as &dyn std::error::Error, "{what}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_rotate_and_run_out() {
        let mut state = State::default();
        state.used.insert(1);
        let taken: Vec<_> = (0..3).map(|_| state.reserve(4).unwrap()).collect();
        assert_eq!(taken, [0, 2, 3]);
        assert!(matches!(state.reserve(4), Err(Error::Exhausted(4))));
        state.used.remove(&2);
        assert_eq!(state.reserve(4).unwrap(), 2);
        state.used.clear();
        assert_eq!(state.reserve(4).unwrap(), 3, "the index freed last is used last");
        assert_eq!(state.reserve(4).unwrap(), 0);
    }
}
