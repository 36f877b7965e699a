//! Relatives: processes that were forked off one another, or off one zygote.
//!
//! They share a user, because fork(2) does not change it, and a memory control group, because memory moves between
//! processes but not between groups: a parent that rewrites a page which a zygote also holds is charged for it. So the
//! group's limit is the sum of what its members may use at worst, and each has a group of its own below for everything
//! else.

use super::Host;
use crate::{
    EngineError, Result,
    cgroup::{self, LineageGroup},
    users::User,
};
use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, PoisonError, Weak},
};

/// Beside the guest's RAM: device buffers, layers' tables, the program.
const OVERHEAD: u64 = 64 << 20;

/// All lineages that have a member.
#[derive(Default)]
pub(super) struct Lineages(Mutex<HashMap<u32, Weak<Lineage>>>);

/// Relatives of one user.
pub(super) struct Lineage {
    /// Held, so that no other lineage gets it. None: this node is not root, and nothing is separated.
    user: Option<User>,
    group: Option<LineageGroup>,
    /// What its members may use.
    bytes: Mutex<u64>,
}

/// One process of a lineage. Its room is given back when it is dropped.
pub(super) struct Member {
    lineage: Arc<Lineage>,
    name: String,
    bytes: u64,
}

impl Lineages {
    /// A new one.
    pub(super) fn found(&self, host: &Host) -> Result<Arc<Lineage>> {
        let Some(first) = host.config.common.first_user else { return Ok(self.keep(host, None)) };
        let none = || EngineError::Monitor("has no user number left to run as".into());
        let user = host.users.draw(first).ok_or_else(none)?;
        Ok(self.keep(host, Some(user)))
    }

    /// That of a machine that was found again.
    pub(super) fn find(&self, host: &Host, user: Option<u32>) -> Arc<Lineage> {
        let known = user.and_then(|id| self.lock().get(&id).and_then(Weak::upgrade));
        known.unwrap_or_else(|| self.keep(host, user.map(|id| host.users.claim(id))))
    }

    fn keep(&self, host: &Host, user: Option<User>) -> Arc<Lineage> {
        let id = user.as_ref().map(User::id);
        let group = id.and_then(|id| LineageGroup::make(&host.config.common.store, id));
        let lineage = Arc::new(Lineage { user, group, bytes: Mutex::default() });
        if let Some(id) = id {
            let mut known = self.lock();
            known.retain(|_, lineage| lineage.strong_count() > 0);
            known.insert(id, Arc::downgrade(&lineage));
        }
        lineage
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Weak<Lineage>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.change(|sum| sum.saturating_add(bytes));
        Member { lineage: Arc::clone(self), name: cgroup::name(dir), bytes }
    }

    fn change(&self, change: impl FnOnce(u64) -> u64) {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        *bytes = change(*bytes);
        if let Some(group) = &self.group {
            group.limit(*bytes);
        }
    }
}

impl Member {
    /// Whose member.
    pub(super) fn lineage(&self) -> &Arc<Lineage> {
        &self.lineage
    }

    /// Puts the process into its group.
    pub(super) fn confine(&self, pid: u32) {
        if let Some(group) = &self.lineage.group {
            group.confine(&self.name, pid);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(group) = &self.lineage.group {
            group.remove(&self.name);
        }
        self.lineage.change(|sum| sum.saturating_sub(self.bytes));
    }
}
