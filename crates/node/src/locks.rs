//! A lock per name, created on demand and dropped when it is unused.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak},
};
use tokio::sync::RwLock;

/// Locks by name.
pub(crate) struct Locks<K> {
    locks: Mutex<HashMap<K, Weak<RwLock<()>>>>,
}

impl<K> Default for Locks<K> {
    fn default() -> Self {
        Self { locks: Mutex::default() }
    }
}

impl<K: Hash + Eq> Locks<K> {
    /// The lock of this name: the same one for all who use it at a time.
    pub fn of(&self, name: K) -> Arc<RwLock<()>> {
        let mut locks = self.locks.lock();
        if let Some(lock) = locks.get(&name).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(RwLock::new(()));
        locks.insert(name, Arc::downgrade(&lock));
        lock
    }

    /// How many names are remembered.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.locks.lock().len()
    }
}
