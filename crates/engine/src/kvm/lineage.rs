//! Relatives: processes that were forked off one another, or off one zygote.
//!
//! They share a user, because fork(2) does not change it, and a memory control group, because
//! memory moves between processes but not between groups: a parent that rewrites a page which a
//! zygote also holds is charged for it. So the group's limit is the sum of what its members may use
//! in the worst case, and each member has a group below it for everything else.
//!
//! A member counts until its process is gone, and any process that it forked without a request is
//! killed with it. An honest monitor never forks without a request; one that its guest has taken
//! over can.

use crate::{
    Common, EngineError, Result,
    cgroup::{self, LineageGroup},
    overhead::KVM_LIMIT,
    users::{User, Users},
};
use keiki_sys::process::{Process, of_user};
use parking_lot::Mutex;
use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// How often unknown processes are looked for, until there are none.
const ROUNDS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// All lineages that have a member.
pub(super) struct Lineages {
    store: PathBuf,
    first_user: Option<u32>,
    users: Users,
    known: Mutex<HashMap<u32, Weak<Lineage>>>,
    /// All machines that an earlier process of the node left have been adopted or are gone.
    adoption_finished: Arc<AtomicBool>,
}

/// Relatives of one user.
pub(super) struct Lineage {
    /// Held, so that no other lineage gets it. None: this node is not root, and monitors are not jailed.
    user: Option<User>,
    group: Option<LineageGroup>,
    members: Mutex<Members>,
    /// Whether all members are known: at once if this process created it, after adoption if an earlier one did.
    complete: Arc<AtomicBool>,
}

#[derive(Default)]
struct Members {
    /// What they may use together.
    bytes: u64,
    /// Their processes.
    pids: BTreeSet<u32>,
    /// How many have no process yet.
    pending: u32,
}

/// One process of a lineage. A member that is dropped before it has a process gives back its room; one that has a
/// process counts until [`Member::ended`].
pub(super) struct Member {
    lineage: Arc<Lineage>,
    name: String,
    bytes: u64,
    state: ProcessState,
}

#[derive(Clone, Copy)]
enum ProcessState {
    Pending,
    Attached(u32),
    Ended,
}

impl Lineages {
    pub(super) fn new(common: &Common) -> Self {
        Self {
            store: common.store.clone(),
            first_user: common.first_user,
            users: Users::default(),
            known: Mutex::default(),
            adoption_finished: Arc::default(),
        }
    }

    /// A new lineage.
    pub(super) fn create(&self) -> Result<Arc<Lineage>> {
        let user = self.first_user.map(|first| self.users.draw(first)).transpose()?;
        Ok(self.keep(user, Arc::new(AtomicBool::new(true))))
    }

    /// The lineage of a machine that an earlier process of the node started.
    pub(super) fn find(&self, user: Option<u32>) -> Arc<Lineage> {
        let known = user.and_then(|id| self.known.lock().get(&id).and_then(Weak::upgrade));
        let claim = |id| self.users.claim(id);
        known.unwrap_or_else(|| self.keep(user.map(claim), Arc::clone(&self.adoption_finished)))
    }

    /// From here on processes that are not known are killed.
    pub(super) fn adoption_finished(&self) {
        self.adoption_finished.store(true, Ordering::Release);
        let lineages: Vec<_> = self.known.lock().values().filter_map(Weak::upgrade).collect();
        lineages.into_iter().for_each(sweep);
    }

    fn keep(&self, user: Option<User>, complete: Arc<AtomicBool>) -> Arc<Lineage> {
        let id = user.as_ref().map(User::id);
        let group = id.and_then(|id| LineageGroup::make(&self.store, id));
        let lineage = Arc::new(Lineage { user, group, members: Mutex::default(), complete });
        if let Some(id) = id {
            let mut known = self.known.lock();
            known.retain(|_, lineage| lineage.strong_count() > 0);
            known.insert(id, Arc::downgrade(&lineage));
        }
        lineage
    }
}

impl Lineage {
    /// The user that its processes run as.
    pub(super) fn user(&self) -> Option<u32> {
        self.user.as_ref().map(User::id)
    }

    /// Room for one more process with this much guest RAM, before it is made. `dir` is its directory.
    pub(super) fn admit(self: &Arc<Self>, dir: &Path, memory_mib: u32) -> Member {
        let bytes = (u64::from(memory_mib) << 20).saturating_add(KVM_LIMIT);
        let mut members = self.members.lock();
        members.pending += 1;
        self.resize(&mut members, |sum| sum.saturating_add(bytes));
        drop(members);
        Member { lineage: Arc::clone(self), name: cgroup::name(dir), bytes, state: ProcessState::Pending }
    }

    fn resize(&self, members: &mut Members, change: impl FnOnce(u64) -> u64) {
        members.bytes = change(members.bytes);
        if let Some(group) = &self.group {
            group.limit(members.bytes);
        }
    }

    /// Kills the processes of its user that are no members. False: there were some, or a member is still being made.
    /// Blocks.
    fn kill_unknown(&self) -> io::Result<bool> {
        let Some(user) = self.user() else { return Ok(true) };
        // What is made from here on is not in this list.
        let found = of_user(user)?;
        let members = self.members.lock();
        let unknown: Vec<&Process> =
            found.iter().filter(|process| !members.pids.contains(&process.pid())).collect();
        if unknown.is_empty() {
            return Ok(true);
        }
        // One of them may be the process of a pending member.
        if members.pending == 0 {
            unknown.iter().try_for_each(|process| {
                tracing::warn!(pid = process.pid(), user, "killing a process that belongs to no machine");
                process.kill()
            })?;
        }
        Ok(false)
    }
}

impl Member {
    pub(super) fn lineage(&self) -> &Arc<Lineage> {
        &self.lineage
    }

    /// Its process exists: puts it into its group.
    pub(super) fn attach(&mut self, pid: u32) -> Result<()> {
        let mut members = self.lineage.members.lock();
        members.pending = members.pending.saturating_sub(1);
        members.pids.insert(pid);
        self.state = ProcessState::Attached(pid);
        drop(members);
        let failed =
            |source| EngineError::Io { what: "cannot put a monitor into its control group".into(), source };
        self.lineage.group.as_ref().map_or(Ok(()), |group| group.confine(&self.name, pid)).map_err(failed)
    }

    /// Lowers its priority among its relatives.
    pub(super) fn defer(&self) {
        if let Some(group) = &self.lineage.group {
            group.defer(&self.name);
        }
    }

    /// Its process is gone.
    pub(super) fn ended(mut self) {
        let ProcessState::Attached(pid) = std::mem::replace(&mut self.state, ProcessState::Ended) else {
            return;
        };
        let mut members = self.lineage.members.lock();
        members.pids.remove(&pid);
        self.lineage.resize(&mut members, |sum| sum.saturating_sub(self.bytes));
        drop(members);
        match self.lineage.group.as_ref().map(|group| group.end(&self.name)) {
            Some(Ok(())) => {}
            // Without such groups, or on a kernel that cannot kill a group.
            Some(Err(_)) | None => sweep(Arc::clone(&self.lineage)),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let ProcessState::Pending = self.state {
            let mut members = self.lineage.members.lock();
            members.pending = members.pending.saturating_sub(1);
            self.lineage.resize(&mut members, |sum| sum.saturating_sub(self.bytes));
            drop(members);
            // Its process may exist, and not have answered.
            sweep(Arc::clone(&self.lineage));
        }
    }
}

/// Kills the unknown processes of a lineage in the background. Its user stays taken until that is done.
fn sweep(lineage: Arc<Lineage>) {
    if lineage.user.is_none() || !lineage.complete.load(Ordering::Acquire) {
        return;
    }
    let work = move || {
        for _ in 0..ROUNDS {
            match lineage.kill_unknown() {
                Ok(true) => return,
                Ok(false) => std::thread::sleep(PAUSE),
                Err(error) => {
                    return tracing::warn!(%error, "processes that belong to no machine may be left");
                }
            }
        }
        tracing::warn!(user = lineage.user(), "processes that belong to no machine do not end");
    };
    // Without a runtime this process is about to end.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(work);
    }
}
