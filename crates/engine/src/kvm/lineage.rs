//! Relatives: processes that were forked off one another, or off one zygote.
//!
//! They share a user, because fork(2) does not change it, and a memory control group, because memory moves between
//! processes but not between groups: a parent that rewrites a page which a zygote also holds is charged for it. So the
//! group's limit is the sum of what its members may use at worst, and each has a group of its own below for everything
//! else.
//!
//! A member's place is given back when its process is gone, not when somebody has lost interest in it; and what it has
//! forked without being asked goes with it. A monitor that obeys makes no such process, one that its guest has taken
//! over can.

use super::Host;
use crate::{
    EngineError, Result,
    cgroup::{self, LineageGroup},
    users::User,
};
use keiki_sys::process::{Process, of_user};
use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Beside the guest's RAM: device buffers, layers' tables, the program.
const OVERHEAD: u64 = 64 << 20;
/// How often is looked for processes that nobody knows, until none is there.
const ROUNDS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// All lineages that have a member.
#[derive(Default)]
pub(super) struct Lineages {
    known: Mutex<HashMap<u32, Weak<Lineage>>>,
    /// Every machine that an earlier process of the node left was looked for.
    all_found: Arc<AtomicBool>,
}

/// Relatives of one user.
pub(super) struct Lineage {
    /// Held, so that no other lineage gets it. None: this node is not root, and nothing is separated.
    user: Option<User>,
    group: Option<LineageGroup>,
    kin: Mutex<Kin>,
    /// Whether its members are known: at once where this process began it, and of one found again once all are found.
    complete: Arc<AtomicBool>,
}

#[derive(Default)]
struct Kin {
    /// What the members may use.
    bytes: u64,
    /// Their processes.
    processes: BTreeSet<u32>,
    /// Members whose process is being made.
    unborn: u32,
}

/// One process of a lineage. Dropped before it has one, it gives back its room; afterwards it counts until
/// [`Member::ended`].
pub(super) struct Member {
    lineage: Arc<Lineage>,
    name: String,
    bytes: u64,
    life: Life,
}

#[derive(Clone, Copy)]
enum Life {
    Unborn,
    Process(u32),
    Ended,
}

impl Lineages {
    /// A new one.
    pub(super) fn found(&self, host: &Host) -> Result<Arc<Lineage>> {
        let complete = Arc::new(AtomicBool::new(true));
        let Some(first) = host.config.common.first_user else { return Ok(self.keep(host, None, complete)) };
        let none = || EngineError::Monitor("has no user number left to run as".into());
        let user = host.users.draw(first).ok_or_else(none)?;
        Ok(self.keep(host, Some(user), complete))
    }

    /// That of a machine that was found again.
    pub(super) fn find(&self, host: &Host, user: Option<u32>) -> Arc<Lineage> {
        let known = user.and_then(|id| self.lock().get(&id).and_then(Weak::upgrade));
        let claim = |id| host.users.claim(id);
        known.unwrap_or_else(|| self.keep(host, user.map(claim), Arc::clone(&self.all_found)))
    }

    /// Whoever is not known by now never will be.
    pub(super) fn all_found(&self) {
        self.all_found.store(true, Ordering::Release);
        let lineages: Vec<_> = self.lock().values().filter_map(Weak::upgrade).collect();
        for lineage in lineages {
            sweep(lineage);
        }
    }

    fn keep(&self, host: &Host, user: Option<User>, complete: Arc<AtomicBool>) -> Arc<Lineage> {
        let id = user.as_ref().map(User::id);
        let group = id.and_then(|id| LineageGroup::make(&host.config.common.store, id));
        let lineage = Arc::new(Lineage { user, group, kin: Mutex::default(), complete });
        if let Some(id) = id {
            let mut known = self.lock();
            known.retain(|_, lineage| lineage.strong_count() > 0);
            known.insert(id, Arc::downgrade(&lineage));
        }
        lineage
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Weak<Lineage>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lineage {
    /// The user that its processes run as.
    pub(super) fn user(&self) -> Option<u32> {
        self.user.as_ref().map(User::id)
    }

    /// Room for one more process with so much guest RAM, before it is made. `dir` is its directory.
    pub(super) fn admit(self: &Arc<Self>, dir: &Path, memory_mib: u32) -> Member {
        let bytes = (u64::from(memory_mib) << 20).saturating_add(OVERHEAD);
        let mut kin = self.lock();
        kin.unborn += 1;
        self.resize(&mut kin, |sum| sum.saturating_add(bytes));
        drop(kin);
        Member { lineage: Arc::clone(self), name: cgroup::name(dir), bytes, life: Life::Unborn }
    }

    fn resize(&self, kin: &mut Kin, change: impl FnOnce(u64) -> u64) {
        kin.bytes = change(kin.bytes);
        if let Some(group) = &self.group {
            group.limit(kin.bytes);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kin> {
        self.kin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends those of its user that are no member. False: there were some, or it could not be told. Blocks.
    fn end_strangers(&self) -> io::Result<bool> {
        let Some(user) = self.user() else { return Ok(true) };
        // What is made from here on is not among them.
        let found = of_user(user)?;
        let kin = self.lock();
        let strangers: Vec<&Process> =
            found.iter().filter(|process| !kin.processes.contains(&process.pid())).collect();
        if strangers.is_empty() {
            return Ok(true);
        }
        // One of them may be what a member is being made of.
        if kin.unborn == 0 {
            strangers.iter().try_for_each(|process| {
                tracing::warn!(pid = process.pid(), user, "a process that no machine needs is ended");
                process.kill()
            })?;
        }
        Ok(false)
    }
}

impl Member {
    /// Whose member.
    pub(super) fn lineage(&self) -> &Arc<Lineage> {
        &self.lineage
    }

    /// Its process is there: puts it into its group.
    pub(super) fn born(&mut self, pid: u32) -> Result<()> {
        let mut kin = self.lineage.lock();
        kin.unborn = kin.unborn.saturating_sub(1);
        kin.processes.insert(pid);
        self.life = Life::Process(pid);
        drop(kin);
        let failed =
            |source| EngineError::Io { what: "cannot put a monitor into its control group".into(), source };
        self.lineage.group.as_ref().map_or(Ok(()), |group| group.confine(&self.name, pid)).map_err(failed)
    }

    /// Others' work comes first.
    pub(super) fn defer(&self) {
        if let Some(group) = &self.lineage.group {
            group.defer(&self.name);
        }
    }

    /// Its process is gone.
    pub(super) fn ended(mut self) {
        let Life::Process(pid) = std::mem::replace(&mut self.life, Life::Ended) else { return };
        let mut kin = self.lineage.lock();
        kin.processes.remove(&pid);
        self.lineage.resize(&mut kin, |sum| sum.saturating_sub(self.bytes));
        drop(kin);
        match self.lineage.group.as_ref().map(|group| group.end(&self.name)) {
            Some(Ok(())) => {}
            // Without such groups, or with those of a kernel that cannot end one.
            Some(Err(_)) | None => sweep(Arc::clone(&self.lineage)),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Life::Unborn = self.life {
            let mut kin = self.lineage.lock();
            kin.unborn = kin.unborn.saturating_sub(1);
            self.lineage.resize(&mut kin, |sum| sum.saturating_sub(self.bytes));
            drop(kin);
            // What was to be it may have been made, and not have said so.
            sweep(Arc::clone(&self.lineage));
        }
    }
}

/// Ends what is of this lineage and not known, in the background. Its user stays taken until that is done.
fn sweep(lineage: Arc<Lineage>) {
    if lineage.user.is_none() || !lineage.complete.load(Ordering::Acquire) {
        return;
    }
    let work = move || {
        for _ in 0..ROUNDS {
            match lineage.end_strangers() {
                Ok(true) => return,
                Ok(false) => std::thread::sleep(PAUSE),
                Err(error) => return tracing::warn!(%error, "processes that no machine needs may be left"),
            }
        }
        tracing::warn!(user = lineage.user(), "processes that no machine needs do not end");
    };
    // Outside of a runtime this process ends.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(work);
    }
}
