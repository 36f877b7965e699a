//! Zygotes of stored machines that stay: making a machine from a template is then one fork.
//!
//! A zygote is kept for the files it was loaded from, known by the inode of their memory, within a sharing scope: who
//! thaws from the same zygote shares memory with others who do, until one writes. Its own memory is mapped from the
//! file, so that one which nobody uses costs little more than its process; the least used go first, and all go when
//! the host runs short or their files are gone.

use super::{
    Host,
    control::about,
    fds::kvm,
    frozen::Zygote,
    machine::shape,
    monitor::Monitor,
    working_set::{self, FirstRun},
};
use crate::{
    EngineError, Result, SharingScope,
    layers::new_name,
    process::{blocking, remove_file},
};
use keiki_control::{Load, Request, Role};
use keiki_snapshot::{Format, MEMORY_FILE, Manifest, STATE_FILE};
use keiki_types::Shape;
use std::{
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};
use tokio::sync::Mutex;

/// Most that are kept.
const MOST: usize = 24;
/// How often is looked whether they may stay.
const LOOK: Duration = Duration::from_secs(10);
/// Below this part of the host's memory available, none is kept.
const SHORT: u64 = 20;

/// Files of a stored machine, opened.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    memory: File,
    state: File,
    shape: Shape,
    digest: [u8; 32],
}

impl Files {
    /// Opens what a manifest tells of.
    pub(super) fn open(dir: &Path, manifest: &Manifest) -> Result<Self> {
        let open = |name: &str| {
            let path = dir.join(name);
            File::open(&path).map_err(EngineError::at("open", &path))
        };
        let digest = blake3::Hash::from_hex(&manifest.state.blake3).map_err(|_| EngineError::Refused {
            dir: dir.to_owned(),
            why: "the digest of its state is none".into(),
        })?;
        Ok(Self {
            dir: dir.to_owned(),
            memory: open(MEMORY_FILE)?,
            state: open(STATE_FILE)?,
            shape: manifest.shape,
            digest: *digest.as_bytes(),
        })
    }

    /// The same file, read from its beginning by somebody else.
    fn again(&self, file: &File) -> Result<File> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::open(path).map_err(EngineError::at("open", &self.dir))
    }

    /// What machines thawed from them read first, if that is known.
    pub(super) fn pages(&self) -> Option<(Role, OwnedFd)> {
        working_set::list(&self.dir, &self.memory).map(|list| (Role::Pages, list))
    }

    /// A machine was thawed from them.
    pub(super) fn thawed(&self, pid: u32) -> Option<FirstRun> {
        working_set::record_later(&self.dir, &self.memory, pid)
    }

    /// Which file the memory is.
    fn key(&self) -> Result<(u64, u64)> {
        let meta = self.memory.metadata().map_err(EngineError::at("look at", &self.dir))?;
        Ok((meta.dev(), meta.ino()))
    }
}

/// The zygotes that stay, the last used last.
#[derive(Default)]
pub(super) struct Residents(Mutex<Vec<Resident>>);

struct Resident {
    key: (u64, u64),
    scope: SharingScope,
    memory: PathBuf,
    zygote: Arc<Zygote>,
}

impl Residents {
    /// The zygote of these files for this scope; loaded if there is none.
    pub(super) async fn get(
        &self,
        host: &Arc<Host>,
        files: &Arc<Files>,
        scope: &SharingScope,
    ) -> Result<Arc<Zygote>> {
        if *scope == SharingScope::None {
            return load(host, files, scope).await;
        }
        let key = files.key()?;
        let mut kept = self.0.lock().await;
        kept.retain(|resident| resident.zygote.monitor.watched.process.is_alive());
        let known = kept.iter().position(|resident| resident.key == key && resident.scope == *scope);
        let resident = match known {
            Some(at) => kept.remove(at),
            None => Resident {
                key,
                scope: scope.clone(),
                memory: files.dir.join(MEMORY_FILE),
                zygote: load(host, files, scope).await?,
            },
        };
        let zygote = Arc::clone(&resident.zygote);
        kept.push(resident);
        let excess = kept.len().saturating_sub(MOST);
        kept.drain(..excess);
        Ok(zygote)
    }

    /// Lets those of this directory go.
    pub(super) async fn forget(&self, dir: &Path) {
        self.0.lock().await.retain(|resident| resident.memory.parent() != Some(dir));
    }

    /// Ends all of them.
    pub(super) async fn close(&self) {
        for resident in self.0.lock().await.drain(..) {
            if let Err(error) = resident.zygote.monitor.watched.kill().await {
                tracing::warn!(%error, "a zygote could not be ended");
            }
        }
    }

    /// Lets go what may not stay.
    async fn tidy(&self) {
        let short = is_short();
        self.0.lock().await.retain(|resident| {
            let there = std::fs::metadata(&resident.memory).map(|meta| (meta.dev(), meta.ino()));
            !short && there.is_ok_and(|there| there == resident.key)
        });
    }
}

/// Tidies as long as the engine is there.
pub(super) async fn keep_tidy(host: Weak<Host>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(host) = host.upgrade() else { return };
        host.residents.tidy().await;
    }
}

/// Is the host short of memory?
fn is_short() -> bool {
    let value = keiki_sys::host::meminfo;
    matches!((value("MemTotal"), value("MemAvailable")), (Some(total), Some(free)) if free < total / SHORT)
}

/// A new zygote of these files.
async fn load(host: &Arc<Host>, files: &Arc<Files>, scope: &SharingScope) -> Result<Arc<Zygote>> {
    // Beside the start of the process. Who is alone has pages of its own, of a file that was never read.
    if *scope != SharingScope::None {
        let ahead = Arc::clone(files);
        drop(tokio::task::spawn_blocking(move || working_set::read_ahead(&ahead.dir, &ahead.memory)));
    }
    let lineage = host.lineages.found(host)?;
    let monitor = Monitor::blank(host, &lineage, files.shape, &files.dir).await?;
    let (source, alone, store) =
        (Arc::clone(files), *scope == SharingScope::None, host.config.common.store.clone());
    let descriptors = blocking(move || {
        let memory =
            if alone { copy_alone(&source.memory, &store)? } else { source.again(&source.memory)? };
        let state = source.again(&source.state)?;
        Ok(vec![kvm()?, (Role::Memory, memory.into()), (Role::State, OwnedFd::from(state))])
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

/// A copy without a name, which shares blocks on disk but no page in memory: what is read of it tells nothing of what
/// others read.
fn copy_alone(memory: &File, store: &Path) -> Result<File> {
    let path = store.join(format!(".{}", new_name(Format::Raw)));
    let to =
        File::options().write(true).create_new(true).open(&path).map_err(EngineError::at("make", &path))?;
    let copied = keiki_sys::files::reflink(memory, &to)
        .and_then(|()| File::open(&path))
        .map_err(EngineError::at("copy memory to", &path));
    remove_file(&path)?;
    copied
}
