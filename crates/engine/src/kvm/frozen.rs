//! A frozen machine: a zygote in memory, or files and the zygote that was loaded from them.
//!
//! ```text
//!   freeze ──> Fresh ──persist──> Stored <── load
//!                │                  │
//!                └── thaw: fork <───┴── the resident zygote of these files
//! ```
//!
//! What a zygote has written is copied before it becomes a base file (blocks are shared), because
//! the zygote keeps the descriptors that it wrote with.

use super::{
    chain,
    control::{ANSWER, Control, WRITE, about, generation, note, unexpected},
    fds::VmFds,
    host::{Host, made},
    monitor::{Background, Monitor, Zygote, end_unrecorded, stderr_pipe},
    running::{KvmPart, KvmVm, Record, assemble},
    stored::StoredFiles,
};
use crate::{
    EngineError, Frozen, Image, Machine, PreparedVm, Result, VmPaths,
    files::{BASE_FILE, manifest, persist},
    fsutil::{link, remove_file},
    layers::{layer_path, new_name},
    prepared::Waiting,
    process::blocking,
    record::{self, CONTROL, Layer},
    users::chmod_readable,
};
use async_trait::async_trait;
use keiki_control::{Answer, Persisted, Reply, Request, Role, Stage, Thaw};
use keiki_snapshot::{DiskLayer, Format, MAX_STATE, MEMORY_FILE, Manifest, STATE_FILE, State};
use keiki_sys::stopwatch::{Steps, Stopwatch};
use keiki_types::Sharing;
use std::{
    fs::{self, File},
    io::{Read, Seek},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::sync::{Mutex, MutexGuard};

/// What a zygote writes into.
const PART: [&str; 2] = ["vm.mem.part", "vm.state.part"];
/// After this many generations a machine is stored and thawed from its files: each fork lengthens
/// what the kernel has to walk for a page of an ancestor.
const GENERATIONS: u32 = 64;

/// A machine at one instant.
pub(super) struct KvmFrozen {
    host: Arc<Host>,
    image: Image,
    layers: Vec<DiskLayer>,
    held: Mutex<Held>,
    /// Locked while it is being stored.
    storing: Mutex<()>,
}

enum Held {
    Fresh(Arc<Zygote>),
    Stored { manifest: Box<Manifest>, files: Arc<StoredFiles>, sharing: Sharing },
}

impl KvmFrozen {
    pub(super) fn fresh(
        host: &Arc<Host>,
        image: Image,
        layers: Vec<DiskLayer>,
        monitor: Monitor,
        generation: u32,
    ) -> Self {
        let held = Held::Fresh(Arc::new(Zygote { monitor, generation }));
        Self::new(host, image, layers, held)
    }

    fn new(host: &Arc<Host>, image: Image, layers: Vec<DiskLayer>, held: Held) -> Self {
        Self { host: Arc::clone(host), image, layers, held: Mutex::new(held), storing: Mutex::default() }
    }

    pub(super) fn stored(
        host: &Arc<Host>,
        dir: &Path,
        manifest: Manifest,
        files: Arc<StoredFiles>,
        sharing: Sharing,
    ) -> Self {
        let alone = sharing == Sharing::None;
        let image = Image { dir: dir.to_owned(), shape: manifest.shape, alone };
        let layers = manifest.layers.clone();
        let held = Held::Stored { manifest: Box::new(manifest), files, sharing };
        Self::new(host, image, layers, held)
    }

    /// A zygote to fork. The memory image under its machines gets another name at `memory`.
    async fn zygote(&self, memory: PathBuf) -> Result<Arc<Zygote>> {
        let old = |held: &Held| matches!(held, Held::Fresh(zygote) if zygote.generation >= GENERATIONS);
        let mut held = self.held.lock().await;
        if old(&held) {
            drop(held);
            self.store(&self.storing.lock().await).await?;
            held = self.held.lock().await;
        }
        let (zygote, base) = match &*held {
            Held::Fresh(zygote) => (Arc::clone(zygote), BASE_FILE),
            Held::Stored { files, sharing, .. } => {
                (self.host.residents.get(files, *sharing).await?, MEMORY_FILE)
            }
        };
        let base = self.image.dir.join(base);
        // Under the lock: a persist that comes to its end removes the base.
        blocking(move || link(&base, &memory)).await?;
        drop(held);
        Ok(zygote)
    }

    /// Writes memory and state, and releases the zygote: one that is loaded from the files costs
    /// less. Meanwhile machines are thawed from the zygote.
    async fn store(&self, _permit: &MutexGuard<'_, ()>) -> Result<Manifest> {
        let zygote = match &*self.held.lock().await {
            Held::Stored { manifest, .. } => return Ok(Manifest::clone(manifest)),
            Held::Fresh(zygote) => Arc::clone(zygote),
        };
        let written = self.write(&zygote).await;
        let dir = self.image.dir.clone();
        let failed = written.is_err();
        blocking(move || {
            // Half-written files are useless.
            let gone = if failed { [MEMORY_FILE, STATE_FILE].as_slice() } else { &[] };
            PART.iter().chain(gone).try_for_each(|name| remove_file(&dir.join(name)))
        })
        .await?;
        let state = written.map_err(about(&self.image.dir))?;
        let manifest = manifest(made(self.image.shape), self.image.shape, state, self.layers.clone());
        let (dir, stored) = (self.image.dir.clone(), manifest.clone());
        let files = Arc::new(blocking(move || StoredFiles::open(&dir, &stored)).await?);
        let base = self.image.dir.join(BASE_FILE);
        let mut held = self.held.lock().await;
        blocking(move || remove_file(&base)).await?;
        *held = Held::Stored { manifest: Box::new(manifest.clone()), files, sharing: Sharing::Workspace };
        Ok(manifest)
    }

    async fn write(&self, zygote: &Zygote) -> Result<State> {
        let (dir, pid) = (self.image.dir.clone(), zygote.monitor.pid());
        let member = zygote.monitor.lineage.admit(&dir.join(new_name(Format::Raw)), 0);
        let ([memory, state], files) = blocking(move || open_parts(&dir, pid)).await?;
        // The copy that writes answers twice: when it begins and when it is done.
        let copy = zygote.monitor.control.ask_copy(Request::Persist, files).await?;
        let (begun, copy) = copy.answer(ANSWER).await?;
        if begun.reply != Reply::Done {
            return Err(unexpected("Persist"));
        }
        let writer = Background::watch(begun.pid, member)?;
        let answered = copy.answer(WRITE).await;
        if let Some(writer) = writer {
            writer.end().await?;
        }
        let (Answer { reply, pid }, _) = answered?;
        let Reply::Persisted(persisted) = reply else { return Err(unexpected("Persist")) };
        if pid != begun.pid {
            return Err(EngineError::Monitor("answered for another process".into()));
        }
        let dir = self.image.dir.clone();
        blocking(move || keep(&dir, &memory, state, &persisted)).await
    }

    /// A zygote of stored files may be gone at any moment, and another can be loaded from them:
    /// this is tried once.
    async fn thaw_in(&self, paths: &VmPaths, fds: VmFds, watch: &mut Stopwatch) -> Result<Arc<KvmVm>> {
        let zygote = self.zygote(paths.dir.join(MEMORY_FILE)).await?;
        let error = match self.thaw_off(&zygote, paths, fds, watch).await {
            Err(error) if self.is_stored().await && zygote.monitor.ends().await => error,
            done => return done,
        };
        let pid = zygote.monitor.pid();
        tracing::warn!(pid, dir = %self.image.dir.display(), %error, "a zygote has exited; loading another");
        // What the first one received cannot be used again: it may have made a machine that has
        // begun to write.
        end_unrecorded(paths).await?;
        let (host, at, disk_mib) = (Arc::clone(&self.host), paths.clone(), self.image.shape.disk_mib);
        let fds = blocking(move || {
            record::clear(&at)?;
            VmFds::prepare(&host.config.common, &at, disk_mib)
        })
        .await?;
        let zygote = self.zygote(paths.dir.join(MEMORY_FILE)).await?;
        self.thaw_off(&zygote, paths, fds, watch).await
    }

    async fn is_stored(&self) -> bool {
        matches!(*self.held.lock().await, Held::Stored { .. })
    }

    async fn thaw_off(
        &self,
        zygote: &Zygote,
        paths: &VmPaths,
        fds: VmFds,
        watch: &mut Stopwatch,
    ) -> Result<Arc<KvmVm>> {
        watch.lap("zygote");
        let layers: Vec<_> = self
            .layers
            .iter()
            .map(|layer| Layer { name: layer.name.clone(), format: layer.format })
            .collect();
        let (top, from) = (fds.top.clone(), self.image.dir.clone());
        let (dir, below) = (paths.dir.clone(), layers.clone());
        let stored = match &*self.held.lock().await {
            // A machine that is alone must not learn what others touched, and has a file that was
            // never read.
            Held::Stored { files, sharing, .. } if *sharing != Sharing::None => Some(Arc::clone(files)),
            _ => None,
        };
        let mut files = blocking(move || {
            for layer in &below {
                link(&layer_path(&from, &layer.name), &layer_path(&dir, &layer.name))?;
            }
            let mut files = fds.with_layers(&dir, &below)?;
            files.extend(stored.and_then(|stored| stored.working_set()));
            Ok(files)
        })
        .await?;
        watch.lap("link");
        let member = zygote.monitor.lineage.admit(&paths.dir, self.image.shape.memory_mib);
        let (stderr, their_stderr) = stderr_pipe()?;
        files.push(their_stderr);
        let request = Request::Thaw(Thaw { generation: generation() });
        // The copy answers itself: its process number comes from the kernel, not from the zygote.
        let copy = zygote.monitor.control.ask_copy(request, files).await?;
        let (Answer { reply, pid }, _) = copy.answer(ANSWER).await?;
        let Reply::Thawed(thawed) = reply else { return Err(unexpected("Thaw")) };
        note(watch, &thawed.steps);
        let control = Control::at(paths.run_dir.join(CONTROL));
        let (monitor, _) = Monitor::forked(pid, control, member, Stage::Machine, stderr).await?;
        let user = monitor.lineage.user();
        let process = &monitor.watched.process;
        let record = Record::new(process, user, self.image.shape, layers, top, KvmPart::default());
        let vm = assemble(&self.host, monitor, paths, record).await?;
        watch.lap("run");
        if let Held::Stored { files, .. } = &*self.held.lock().await {
            *vm.backend.first_run.lock() = files.thawed(pid);
        }
        chain::shorten(&vm, &*vm.record.lock().await);
        Ok(vm)
    }
}

/// Files for a zygote to write into, memory that begins as its base and an empty state: our
/// descriptors, to read back what was written, and the zygote's.
type Parts = ([File; 2], Vec<(Role, OwnedFd)>);

fn open_parts(dir: &Path, pid: u32) -> Result<Parts> {
    let make = |name: &str| {
        let path = dir.join(name);
        remove_file(&path)?;
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        file.map_err(EngineError::at("make", &path))
    };
    let [memory, state] = [make(PART[0])?, make(PART[1])?];
    let base = dir.join(BASE_FILE);
    let source = File::open(&base).map_err(EngineError::at("open", &base))?;
    keiki_sys::files::reflink(&source, &memory).map_err(EngineError::at("fill", &dir.join(PART[0])))?;
    let pagemap = PathBuf::from(format!("/proc/{pid}/pagemap"));
    let pagemap = File::open(&pagemap).map_err(EngineError::at("open", &pagemap))?;
    let copy = |file: &File| file.try_clone().map_err(EngineError::at("open", dir));
    let files = vec![
        (Role::Memory, copy(&memory)?.into()),
        (Role::State, copy(&state)?.into()),
        (Role::Pagemap, pagemap.into()),
    ];
    Ok(([memory, state], files))
}

/// Makes base files of what a zygote wrote, and checks it against what it reported.
fn keep(dir: &Path, memory: &File, mut state: File, persisted: &Persisted) -> Result<State> {
    let path = dir.join(STATE_FILE);
    let mut bytes = Vec::new();
    state.rewind().map_err(EngineError::at("read", &path))?;
    state.take(MAX_STATE + 1).read_to_end(&mut bytes).map_err(EngineError::at("read", &path))?;
    let digest = blake3::hash(&bytes);
    if bytes.len() as u64 > MAX_STATE
        || bytes.len() as u64 != persisted.state_bytes
        || *digest.as_bytes() != persisted.digest
    {
        return Err(EngineError::Monitor("wrote another state than it reports".into()));
    }
    fs::write(&path, &bytes).map_err(EngineError::at("write", &path))?;
    chmod_readable(&path)?;
    let path = dir.join(MEMORY_FILE);
    let kept =
        File::options().write(true).create_new(true).open(&path).map_err(EngineError::at("make", &path))?;
    keiki_sys::files::reflink(memory, &kept).map_err(EngineError::at("fill", &path))?;
    chmod_readable(&path)?;
    Ok(State { bytes: bytes.len() as u64, blake3: digest.to_hex().to_string() })
}

#[async_trait]
impl Frozen for KvmFrozen {
    fn image(&self) -> &Image {
        &self.image
    }

    async fn thaw(&self, prepared: PreparedVm) -> Result<(Box<dyn Machine>, Steps)> {
        let mut watch = Stopwatch::start();
        let (paths, fds) = prepared.take(&self.image, |waiting| match waiting {
            Waiting::Kvm(fds) => Ok(fds),
            other => Err(other),
        })?;
        match self.thaw_in(&paths, fds, &mut watch).await {
            Ok(vm) => Ok((Box::new(vm), watch.into_steps())),
            Err(error) => {
                end_unrecorded(&paths).await?;
                blocking(move || record::clear(&paths)).await?;
                Err(about(&self.image.dir)(error))
            }
        }
    }

    async fn persist(&self) -> Result<Manifest> {
        let permit = self.storing.lock().await;
        let manifest = self.store(&permit).await?;
        let dir = self.image.dir.clone();
        blocking(move || persist(&dir, manifest)).await
    }
}
