//! A frozen machine: a zygote in memory, or files and the zygote that was loaded from them.
//!
//! ```text
//!   freeze ──> Fresh ──persist──> Stored <── load
//!                │                  │
//!                └── thaw: fork <───┴── the resident zygote of these files
//! ```
//!
//! What a zygote has written is copied before it becomes a base file (blocks are shared): it keeps the descriptors
//! that it wrote with.

use super::{
    Host,
    control::{WRITE, about, failed},
    freeze::link,
    ground::Ground,
    machine::{KvmMachine, assemble, expect, generation, new_record},
    monitor::Monitor,
    resident::Files,
};
use crate::{
    EngineError, Frozen, Image, Machine, Resources, Result, Seat, SharingScope, Steps,
    files::{now, persist},
    layers::layer_path,
    process::{blocking, remove_file},
    record::{self, CONTROL, Layer},
    steps::Stopwatch,
    users::show,
};
use async_trait::async_trait;
use keiki_control::{Persisted, Reply, Request, Role, Stage, Thaw};
use keiki_snapshot::{DiskLayer, KIND, MAX_STATE, MEMORY_FILE, Manifest, Memory, STATE_FILE, State, VERSION};
use keiki_sys::process::Process;
use std::{
    any::Any,
    fs::{self, File},
    io::{Read, Seek},
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::sync::Mutex;

/// The memory image that a machine which is not stored yet runs on, in the directory of the frozen one.
pub(super) const BASE: &str = "base.mem";
/// What a zygote writes into.
const PART: [&str; 2] = ["vm.mem.part", "vm.state.part"];
/// From here on a lineage begins anew: the machine is stored, and thawed from its files. Each fork lengthens what the
/// kernel has to walk for a page of an ancestor.
const GENERATIONS: u32 = 64;

/// A zygote. Its process ends with it.
pub(super) struct Zygote {
    pub(super) monitor: Monitor,
    pub(super) generation: u32,
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // It ends by itself when its socket closes; a hostile one does not.
        if let Err(error) = self.monitor.watched.process.kill() {
            tracing::warn!(%error, "a zygote could not be ended");
        }
    }
}

/// A machine at one instant.
pub(super) struct KvmFrozen {
    host: Arc<Host>,
    image: Image,
    layers: Vec<DiskLayer>,
    held: Mutex<Held>,
}

enum Held {
    Fresh(Arc<Zygote>),
    Stored { manifest: Box<Manifest>, files: Arc<Files>, scope: SharingScope },
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
        Self { host: Arc::clone(host), image, layers, held: Mutex::new(held) }
    }

    pub(super) fn stored(
        host: &Arc<Host>,
        dir: &Path,
        manifest: Manifest,
        files: Arc<Files>,
        scope: SharingScope,
    ) -> Self {
        let alone = scope == SharingScope::None;
        let image = Image { dir: dir.to_owned(), shape: manifest.shape, alone };
        let layers = manifest.layers.clone();
        let held = Held::Stored { manifest: Box::new(manifest), files, scope };
        Self { host: Arc::clone(host), image, layers, held: Mutex::new(held) }
    }

    /// A zygote to fork off. The memory image under its machines gets another name at `memory`.
    async fn zygote(&self, memory: PathBuf) -> Result<Arc<Zygote>> {
        let mut held = self.held.lock().await;
        if matches!(&*held, Held::Fresh(zygote) if zygote.generation >= GENERATIONS) {
            self.store(&mut held).await?;
        }
        let (zygote, base) = match &*held {
            Held::Fresh(zygote) => (Arc::clone(zygote), BASE),
            Held::Stored { files, scope, .. } => {
                (self.host.residents.get(&self.host, files, scope).await?, MEMORY_FILE)
            }
        };
        let base = self.image.dir.join(base);
        blocking(move || link(&base, &memory)).await?;
        Ok(zygote)
    }

    /// Writes memory and state, and lets the zygote go: one that is loaded from the files costs less.
    async fn store(&self, held: &mut Held) -> Result<Manifest> {
        let zygote = match held {
            Held::Stored { manifest, .. } => return Ok(Manifest::clone(manifest)),
            Held::Fresh(zygote) => Arc::clone(zygote),
        };
        let written = self.write(&zygote).await;
        let dir = self.image.dir.clone();
        let failed = written.is_err();
        blocking(move || {
            PART.iter().try_for_each(|name| remove_file(&dir.join(name)))?;
            // A base under another name is needed no more, or the files that were not finished are of no use.
            let gone: &[&str] = if failed { &[MEMORY_FILE, STATE_FILE] } else { &[BASE] };
            gone.iter().try_for_each(|name| remove_file(&dir.join(name)))
        })
        .await?;
        let state = written.map_err(about(&self.image.dir))?;
        let manifest = Manifest {
            kind: KIND.into(),
            version: VERSION,
            created_at: now(),
            made_by: super::made(self.image.shape),
            shape: self.image.shape,
            memory: Memory { bytes: u64::from(self.image.shape.memory_mib) << 20 },
            state,
            layers: self.layers.clone(),
        };
        let (dir, stored) = (self.image.dir.clone(), manifest.clone());
        let files = blocking(move || Files::open(&dir, &stored)).await?;
        let scope = SharingScope::Workspace(self.image.dir.display().to_string());
        *held = Held::Stored { manifest: Box::new(manifest.clone()), files: Arc::new(files), scope };
        Ok(manifest)
    }

    async fn write(&self, zygote: &Zygote) -> Result<State> {
        let (dir, pid) = (self.image.dir.clone(), zygote.monitor.pid());
        let ([memory, state], files) = blocking(move || open_parts(&dir, pid)).await?;
        let answer = zygote.monitor.control.ask(Request::Persist, files, WRITE).await?;
        let Reply::Persisted(persisted) = answer.reply else {
            return Err(failed(keiki_control::ControlError::Unexpected { request: "Persist" }));
        };
        let dir = self.image.dir.clone();
        blocking(move || keep(&dir, &memory, state, &persisted)).await
    }

    async fn thaw_in(
        &self,
        resources: &Resources,
        ground: Ground,
        watch: &mut Stopwatch,
    ) -> Result<KvmMachine> {
        let zygote = self.zygote(resources.dir.join(MEMORY_FILE)).await?;
        watch.step("zygote");
        let layers: Vec<_> = self
            .layers
            .iter()
            .map(|layer| Layer { name: layer.name.clone(), format: layer.format })
            .collect();
        let (top, from) = (ground.top.clone(), self.image.dir.clone());
        let (dir, below) = (resources.dir.clone(), layers.clone());
        let files = blocking(move || {
            for layer in &below {
                link(&layer_path(&from, &layer.name), &layer_path(&dir, &layer.name))?;
            }
            ground.with_layers(&dir, &below)
        })
        .await?;
        watch.step("link");
        let member = zygote.monitor.member.lineage().admit(&resources.dir, self.image.shape.memory_mib);
        let request = Request::Thaw(Thaw { generation: generation() });
        // The copy answers itself, by the kernel's word.
        let (thawed, pid) = expect(&zygote.monitor.control, request, files, |reply| match reply {
            Reply::Thawed(thawed) => Some(thawed),
            _ => None,
        })
        .await?;
        super::note(watch, &thawed.steps);
        let control = super::control::Control::at(resources.run_dir.join(CONTROL));
        let (monitor, _) = match Monitor::forked(pid, control, member, Stage::Machine).await {
            Ok(monitor) => monitor,
            Err(error) => {
                end(pid, resources);
                return Err(error);
            }
        };
        let record = new_record(&monitor, self.image.shape, layers, top);
        let machine = assemble(&self.host, monitor, resources, record).await?;
        watch.step("run");
        if let Held::Stored { files, .. } = &*self.held.lock().await {
            files.thawed(pid);
        }
        super::chain::shorten(&machine.0, &*machine.0.record.lock().await);
        Ok(machine)
    }
}

/// Files for a zygote to write into: memory that begins as its base, a state that is empty. Ours, to read back what
/// was written, and its own.
type Parts = ([File; 2], Vec<(Role, std::os::fd::OwnedFd)>);

fn open_parts(dir: &Path, pid: u32) -> Result<Parts> {
    let make = |name: &str| {
        let path = dir.join(name);
        remove_file(&path)?;
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        file.map_err(EngineError::at("make", &path))
    };
    let [memory, state] = [make(PART[0])?, make(PART[1])?];
    let base = dir.join(BASE);
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

/// Makes base files of what a zygote wrote, and checks that it wrote what it says.
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
        return Err(EngineError::Monitor("wrote another state than it says".into()));
    }
    fs::write(&path, &bytes).map_err(EngineError::at("write", &path))?;
    show(&path)?;
    let path = dir.join(MEMORY_FILE);
    let kept =
        File::options().write(true).create_new(true).open(&path).map_err(EngineError::at("make", &path))?;
    keiki_sys::files::reflink(memory, &kept).map_err(EngineError::at("fill", &path))?;
    show(&path)?;
    Ok(State { bytes: bytes.len() as u64, blake3: digest.to_hex().to_string() })
}

#[async_trait]
impl Frozen for KvmFrozen {
    fn image(&self) -> &Image {
        &self.image
    }

    async fn thaw(&self, seat: Box<dyn Seat>) -> Result<(Box<dyn Machine>, Steps)> {
        let mut seat = seat
            .into_any()
            .downcast::<KvmSeat>()
            .map_err(|_| EngineError::Monitor("is a seat of another engine".into()))?;
        if seat.image != self.image {
            return Err(EngineError::Monitor("is a seat of another image".into()));
        }
        let mut watch = Stopwatch::start();
        let resources = seat.resources.clone();
        let ground =
            seat.ground.take().ok_or_else(|| EngineError::Monitor("was taken from its seat".into()))?;
        match self.thaw_in(&resources, ground, &mut watch).await {
            Ok(machine) => Ok((Box::new(machine), watch.done())),
            Err(error) => {
                end_stray(&resources).await;
                blocking(move || record::clear(&resources)).await?;
                Err(about(&self.image.dir)(error))
            }
        }
    }

    async fn persist(&self) -> Result<Manifest> {
        let mut held = self.held.lock().await;
        let manifest = self.store(&mut held).await?;
        let dir = self.image.dir.clone();
        blocking(move || persist(&dir, manifest)).await
    }
}

/// Ends the machine that listens at the control socket of these resources, if there is one: a thaw that failed after
/// its fork, or that a node did not live to record.
pub(super) async fn end_stray(resources: &Resources) {
    let control = super::control::Control::at(resources.run_dir.join(CONTROL));
    if let Ok((_, pid)) = control.hello().await {
        end(pid, resources);
    }
}

/// Ends a process that has just answered.
fn end(pid: u32, resources: &Resources) {
    let ended = Process::open(pid).and_then(|process| process.as_ref().map_or(Ok(()), Process::kill));
    tracing::warn!(pid, dir = %resources.dir.display(), ?ended, "a machine that was never recorded is ended");
}

/// Opened descriptors that wait for a thaw.
pub(super) struct KvmSeat {
    pub(super) resources: Resources,
    pub(super) image: Image,
    /// None once it was taken.
    pub(super) ground: Option<Ground>,
}

#[async_trait]
impl Seat for KvmSeat {
    fn resources(&self) -> &Resources {
        &self.resources
    }

    fn is_alive(&self) -> bool {
        self.ground.is_some()
    }

    async fn cancel(mut self: Box<Self>) {
        self.ground = None;
        let resources = self.resources.clone();
        if let Err(error) = blocking(move || record::clear(&resources)).await {
            tracing::warn!(%error, "a seat left something behind");
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl Drop for KvmSeat {
    fn drop(&mut self) {
        if self.ground.take().is_none() {
            return;
        }
        if let Err(error) = record::clear(&self.resources) {
            tracing::warn!(%error, "a seat left something behind");
        }
    }
}
