//! Zygotes of stored machines that stay resident: creating a machine from a template is then one
//! fork.
//!
//! A zygote is kept for the files it was loaded from, known by the inode of their memory, within a
//! sharing scope: machines of one zygote share memory until they write to it. Its own memory is
//! mapped from the file, so that an unused zygote costs little more than its process. The least
//! used are ended first, and all end when the host runs short of memory or their files are gone.

use super::{
    control::{about, shape},
    fds::kvm,
    lineage::Lineages,
    monitor::{Monitor, Zygote},
    stored::StoredFiles,
};
use crate::{Result, process::blocking};
use keiki_control::{Load, Request};
use keiki_snapshot::MEMORY_FILE;
use keiki_types::Sharing;
use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Once},
    time::Duration,
};
use tokio::sync::Mutex;

/// Most that are kept.
const MOST: usize = 24;
/// How often it is checked whether they may stay.
const CHECK: Duration = Duration::from_secs(10);
/// Below this part of the host's memory available, none is kept.
const SHORT: u64 = 20;

/// Zygotes of stored machines, the least used first.
pub(super) struct Residents {
    binary: PathBuf,
    store: PathBuf,
    lineages: Arc<Lineages>,
    kept: Mutex<Vec<Resident>>,
    checks: Once,
}

struct Resident {
    key: (u64, u64),
    sharing: Sharing,
    memory: PathBuf,
    zygote: Arc<Zygote>,
}

impl Residents {
    pub(super) fn new(binary: &Path, store: &Path, lineages: &Arc<Lineages>) -> Self {
        Self {
            binary: binary.to_owned(),
            store: store.to_owned(),
            lineages: Arc::clone(lineages),
            kept: Mutex::default(),
            checks: Once::new(),
        }
    }

    /// The zygote of these files, loaded if needed. Machines that share nothing have one each.
    pub(super) async fn get(&self, files: &Arc<StoredFiles>, sharing: Sharing) -> Result<Arc<Zygote>> {
        if sharing == Sharing::None {
            return self.load(files, sharing).await;
        }
        let key = files.key()?;
        let mut kept = self.kept.lock().await;
        kept.retain(|resident| resident.zygote.monitor.watched.process.is_alive());
        let known = kept.iter().position(|resident| resident.key == key && resident.sharing == sharing);
        let resident = match known {
            Some(at) => kept.remove(at),
            None => {
                let zygote = self.load(files, sharing).await?;
                Resident { key, sharing, memory: files.dir.join(MEMORY_FILE), zygote }
            }
        };
        let zygote = Arc::clone(&resident.zygote);
        kept.push(resident);
        let excess = kept.len().saturating_sub(MOST);
        kept.drain(..excess);
        Ok(zygote)
    }

    /// Ends the zygotes of this directory.
    pub(super) async fn forget(&self, dir: &Path) {
        self.kept.lock().await.retain(|resident| resident.memory.parent() != Some(dir));
    }

    /// Ends all of them.
    pub(super) async fn close(&self) {
        for resident in self.kept.lock().await.drain(..) {
            if let Err(error) = resident.zygote.monitor.watched.kill().await {
                tracing::warn!(%error, "cannot end a zygote");
            }
        }
    }

    /// From now on, as long as the engine exists, checks again and again which of them may stay.
    pub(super) fn keep_checked(self: &Arc<Self>) {
        let residents = Arc::downgrade(self);
        self.checks.call_once(|| {
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(CHECK).await;
                    let Some(residents) = residents.upgrade() else { return };
                    residents.check().await;
                }
            });
        });
    }

    async fn check(&self) {
        let short = is_short();
        self.kept.lock().await.retain(|resident| {
            let there = std::fs::metadata(&resident.memory).map(|meta| (meta.dev(), meta.ino()));
            !short && there.is_ok_and(|there| there == resident.key)
        });
    }

    async fn load(&self, files: &Arc<StoredFiles>, sharing: Sharing) -> Result<Arc<Zygote>> {
        let alone = sharing == Sharing::None;
        // While the process starts. A machine that shares nothing has a copy, about which nothing
        // is recorded.
        if !alone {
            let ahead = Arc::clone(files);
            drop(tokio::task::spawn_blocking(move || ahead.read_ahead()));
        }
        let lineage = self.lineages.create()?;
        let monitor = Monitor::blank(&self.binary, &lineage, files.shape, &files.dir).await?;
        let (source, store) = (Arc::clone(files), self.store.clone());
        let descriptors = blocking(move || {
            let [memory, state] = source.descriptors(alone, &store)?;
            Ok(vec![kvm()?, memory, state])
        });
        let request = Request::Load(Load { shape: shape(files.shape), digest: files.digest });
        let loaded = match descriptors.await {
            Ok(descriptors) => monitor.control.order(request, descriptors).await,
            Err(error) => Err(error),
        };
        match loaded {
            Ok(()) => Ok(Arc::new(Zygote { monitor, generation: 0 })),
            Err(error) => Err(about(&files.dir)(monitor.give_up(error).await)),
        }
    }
}

/// Is the host short of memory?
fn is_short() -> bool {
    let value = keiki_sys::host::meminfo;
    matches!((value("MemTotal"), value("MemAvailable")), (Some(total), Some(free)) if free < total / SHORT)
}
