//! A lock per name, created on demand and dropped when it is unused.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak},
};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

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
    /// Keeps what has this name, together with others. Look whether it is still there after this,
    /// not before.
    pub async fn hold(&self, name: impl Into<K>) -> OwnedRwLockReadGuard<()> {
        self.of(name.into()).read_owned().await
    }

    /// Waits until what has this name has no holder.
    pub async fn claim(&self, name: impl Into<K>) -> OwnedRwLockWriteGuard<()> {
        self.of(name.into()).write_owned().await
    }

    /// The lock of this name: all concurrent users share one.
    fn of(&self, name: K) -> Arc<RwLock<()>> {
        let mut locks = self.locks.lock();
        if let Some(lock) = locks.get(&name).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(RwLock::new(()));
        locks.insert(name, Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use super::Locks;
    use std::{
        path::{Path, PathBuf},
        time::Duration,
    };
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_directory_is_claimed_when_nobody_holds_it() {
        let (sources, dir, soon) = (Locks::<PathBuf>::default(), Path::new("/x"), Duration::from_millis(20));
        let first = sources.hold(dir).await;
        let second = sources.hold(dir).await;
        drop(first);
        assert!(timeout(soon, sources.claim(dir)).await.is_err(), "claimed while held");
        assert!(timeout(soon, sources.claim(Path::new("/y"))).await.is_ok(), "another directory");
        drop(second);
        let claim = timeout(soon, sources.claim(dir)).await;
        assert!(claim.is_ok());
        assert!(timeout(soon, sources.hold(dir)).await.is_err(), "held while claimed");
        drop(claim);
        drop(sources.hold(Path::new("/z")).await);
        assert_eq!(sources.locks.lock().len(), 1, "the unused are forgotten");
    }
}
