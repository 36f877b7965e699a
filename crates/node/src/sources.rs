//! Directories that machines are thawed from: one that is being read is not removed.
//!
//! Removing a snapshot or a template version first removes its name, so that no new user finds it,
//! then claims the directory, which waits for its holders. A running machine no longer needs it: it
//! has hard links.

use crate::locks::Locks;
use std::path::{Path, PathBuf};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard};

/// As long as it exists, the directory stays.
pub(crate) struct Hold {
    _guard: OwnedRwLockReadGuard<()>,
}

/// The directory has no holder.
pub(crate) struct Claim {
    _guard: OwnedRwLockWriteGuard<()>,
}

/// Which directories are held.
#[derive(Default)]
pub(crate) struct Sources {
    locks: Locks<PathBuf>,
}

impl Sources {
    /// Keeps a directory. Check whether it is still named after this call, not before.
    pub async fn hold(&self, dir: &Path) -> Hold {
        Hold { _guard: self.locks.of(dir.into()).read_owned().await }
    }

    /// Waits until a directory whose name was removed has no holder.
    pub async fn claim(&self, dir: &Path) -> Claim {
        Claim { _guard: self.locks.of(dir.into()).write_owned().await }
    }
}

#[cfg(test)]
mod tests {
    use super::Sources;
    use std::{path::Path, time::Duration};
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_directory_is_claimed_when_nobody_holds_it() {
        let (sources, dir, soon) = (Sources::default(), Path::new("/x"), Duration::from_millis(20));
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
        assert_eq!(sources.locks.len(), 1, "the unused are forgotten");
    }
}
