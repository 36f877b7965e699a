//! Templates: built from packages, baked by one cold boot, then restored for every create.
//!
//! ```text
//!   build: packages ──> kernel, initramfs, root disk      (keiki-image, cached)
//!   bake:  boot ──> agent ready ──> warm ──> freeze ──> persist ──> record
//!   use:   load once, keep VMs prepared ahead for creates
//! ```
//!
//! One build per template at a time; who asks meanwhile joins it, and a create is told to come back.

use super::{Inner, bake::Recipe, fleet::Prepared, sources::Hold};
use crate::{
    error::{Error, Result},
    records::{TemplateRecord, rfc3339},
};
use futures::{StreamExt, stream::BoxStream};
use keiki_api::request;
use keiki_engine::Frozen;
use keiki_image::{Builder, Catalog, TemplateSpec};
use keiki_sys::{error_chain, failpoint};
use keiki_types::{
    SandboxId, Shape, Sharing, TemplateName,
    api::{Build, BuildTemplate, Template},
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{HashMap, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use time::OffsetDateTime;
use tokio::{sync::watch, task::JoinSet};

/// What a create is told while its template is being built.
const RETRY_AFTER: Duration = Duration::from_secs(3);
/// Builds remembered, with their logs.
const BUILDS_KEPT: usize = 32;
/// Lines of a build's log that are kept.
const LOG_LINES: usize = 2000;
/// Refilling waits this long, so that it does not compete with the create that took a VM.
const REFILL_PAUSE: Duration = Duration::from_millis(250);
/// The templates of a node.
#[derive(Default)]
pub(super) struct Templates {
    state: Mutex<State>,
    building: tokio::sync::Mutex<JoinSet<()>>,
}

#[derive(Default)]
struct State {
    baked: HashMap<String, Arc<Baked>>,
    builds: VecDeque<Arc<Building>>,
}

/// A template ready for use.
pub(super) struct Baked {
    pub record: TemplateRecord,
    pub frozen: Arc<dyn Frozen>,
    ahead: Mutex<Ahead>,
}

/// VMs prepared ahead of creates.
#[derive(Default)]
struct Ahead {
    ready: VecDeque<Prepared>,
    making: usize,
    closed: bool,
}

pub(super) struct Building {
    id: String,
    name: String,
    progress: watch::Sender<Progress>,
}

#[derive(Clone)]
struct Progress {
    view: Build,
    lines: Vec<String>,
}

impl Baked {
    fn new(record: TemplateRecord, frozen: Arc<dyn Frozen>) -> Arc<Self> {
        Arc::new(Self { record, frozen, ahead: Mutex::default() })
    }

    /// A VM that was prepared ahead, if one is there.
    pub fn take_ahead(&self) -> Option<Prepared> {
        let mut ahead = self.ahead.lock();
        while let Some(prepared) = ahead.ready.pop_front() {
            if prepared.is_alive() {
                return Some(prepared);
            }
            tracing::warn!(id = %prepared.id, "a VM that was prepared ahead has ended");
        }
        None
    }
}

impl Baked {
    /// Keeps a VM for a create; gives it back if none is wanted any more.
    fn keep_ahead(&self, prepared: Result<Prepared>) -> Option<Prepared> {
        let mut ahead = self.ahead.lock();
        ahead.making -= 1;
        match prepared {
            Ok(prepared) if ahead.closed => return Some(prepared),
            Ok(prepared) => ahead.ready.push_back(prepared),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "no VM could be prepared ahead");
            }
        }
        None
    }
}

impl Building {
    fn update(&self, change: impl FnOnce(&mut Progress)) {
        self.progress.send_modify(change);
    }

    pub fn say(&self, line: &str) {
        tracing::info!(template = self.name, line, "build");
        self.update(|progress| {
            line.clone_into(&mut progress.view.step);
            if progress.lines.len() < LOG_LINES {
                progress.lines.push(line.into());
            }
        });
    }

    fn is_running(&self) -> bool {
        self.progress.borrow().view.ended_at.is_empty()
    }
}

impl Templates {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Newest first.
    pub fn builds(&self) -> Vec<Build> {
        self.state().builds.iter().rev().map(|build| build.progress.borrow().view.clone()).collect()
    }

    /// Lines of a build from its start, ending with it.
    pub fn log(&self, id: &str) -> Option<BoxStream<'static, String>> {
        let build = self.state().builds.iter().find(|build| build.id == id).cloned()?;
        let progress = build.progress.subscribe();
        let lines =
            futures::stream::unfold((progress, 0, Some(build)), |(mut progress, sent, keep)| async move {
                loop {
                    let (fresh, ended) = {
                        let now = progress.borrow_and_update();
                        (now.lines.get(sent..).unwrap_or_default().to_vec(), !now.view.ended_at.is_empty())
                    };
                    if !fresh.is_empty() {
                        let sent = sent + fresh.len();
                        return Some((futures::stream::iter(fresh), (progress, sent, keep)));
                    }
                    if ended || progress.changed().await.is_err() {
                        return None;
                    }
                }
            });
        Some(lines.flatten().boxed())
    }

    /// Monitors that wait for a create, by template.
    pub(super) fn prestarted(&self) -> Vec<(String, usize)> {
        let state = self.state();
        let mut all: Vec<_> = state
            .baked
            .values()
            .map(|baked| (baked.record.name.clone(), baked.ahead.lock().ready.len()))
            .collect();
        all.sort();
        all
    }

    fn current(&self, name: &str) -> Option<Arc<Baked>> {
        self.state().baked.get(name).cloned()
    }

    fn running(&self, name: &str) -> Option<Arc<Building>> {
        self.state().builds.iter().find(|build| build.name == name && build.is_running()).cloned()
    }

    /// Joins the running build of this template, or begins one.
    fn begin(&self, name: &str) -> (Arc<Building>, bool) {
        let mut state = self.state();
        if let Some(running) = state.builds.iter().find(|build| build.name == name && build.is_running()) {
            return (Arc::clone(running), false);
        }
        let view = Build {
            id: SandboxId::new().to_string(),
            name: name.into(),
            status: "running".into(),
            error: String::new(),
            started_at: rfc3339(OffsetDateTime::now_utc()),
            ended_at: String::new(),
            step: String::new(),
        };
        let id = view.id.clone();
        let progress = watch::Sender::new(Progress { view, lines: Vec::new() });
        let build = Arc::new(Building { id, name: name.into(), progress });
        state.builds.push_back(Arc::clone(&build));
        while state.builds.len() > BUILDS_KEPT && !state.builds[0].is_running() {
            state.builds.pop_front();
        }
        (build, true)
    }
}

impl Inner {
    /// A baked template, which stays as long as it is held, or what to do about it.
    pub(super) async fn baked(self: &Arc<Self>, name: &TemplateName) -> Result<(Arc<Baked>, Hold)> {
        while let Some(baked) = self.templates.current(name.as_str()) {
            let held = self.sources.hold(&self.dir_of(&baked)).await;
            if self.templates.current(name.as_str()).is_some_and(|now| Arc::ptr_eq(&now, &baked)) {
                return Ok((baked, held));
            }
        }
        if self.templates.running(name.as_str()).is_none() {
            self.build_template(BuildTemplate { name: name.to_string(), ..BuildTemplate::default() }).await?;
        }
        Err(Error::Busy {
            why: format!("template {name} is being built; `keiki template build {name}` shows how far it is"),
            retry_after: RETRY_AFTER,
        })
    }

    /// Has this template another version than this by now? Not if there is none of its name any more.
    pub(super) fn is_rebuilt(&self, template: &str, version: &str) -> bool {
        self.templates.current(template).is_some_and(|current| current.record.version != version)
    }

    fn catalog(&self) -> Catalog {
        Catalog::new(self.config.templates_dir.clone())
    }

    pub(super) async fn templates_view(&self) -> Result<Vec<Template>> {
        let mut all: Vec<Template> = self.records.all::<TemplateRecord>().await?.iter().map(view).collect();
        let catalog = self.catalog();
        for name in catalog.names() {
            if all.iter().any(|template| template.name == name) {
                continue;
            }
            match catalog.get(&name) {
                Ok(spec) => all.extend(spec.as_ref().map(missing)),
                // Whoever builds it is told.
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "a template is not listed")
                }
            }
        }
        for template in &mut all {
            if self.templates.running(&template.name).is_some() {
                template.status = "building".into();
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub(super) async fn build_template(self: &Arc<Self>, request: BuildTemplate) -> Result<Build> {
        let name: TemplateName =
            request.name.parse().map_err(|error| Error::Invalid(format!("name: {error}")))?;
        let catalog = self.catalog();
        let found = catalog.get(name.as_str());
        let spec = found.map_err(|error| Error::Invalid(error_chain(&error)))?.ok_or_else(|| {
            Error::NotFound(format!("no template {name}; there are: {}", catalog.names().join(", ")))
        })?;
        let shape = request::build_shape(&request, spec.shape)?;
        let mut building = self.templates.building.lock().await;
        if self.under_way.is_closed() {
            return Err(super::stopping());
        }
        let (build, is_new) = self.templates.begin(&spec.name);
        if is_new {
            let (node, build) = (Arc::clone(self), Arc::clone(&build));
            while building.try_join_next().is_some() {}
            building.spawn(async move {
                let done = node.build(&spec, shape, &request, &build).await;
                build.update(|progress| {
                    progress.view.ended_at = rfc3339(OffsetDateTime::now_utc());
                    match done {
                        Ok(()) => progress.view.status = "done".into(),
                        Err(error) => {
                            tracing::error!(
                                template = spec.name,
                                error = &error as &dyn std::error::Error,
                                "build failed"
                            );
                            progress.view.status = "failed".into();
                            progress.view.error = error_chain(&error);
                            progress.lines.push(format!("failed: {}", error_chain(&error)));
                        }
                    }
                });
            });
        }
        let now = build.progress.borrow().view.clone();
        Ok(now)
    }

    async fn build(
        self: &Arc<Self>,
        spec: &TemplateSpec,
        shape: Shape,
        request: &BuildTemplate,
        build: &Arc<Building>,
    ) -> Result<()> {
        let _armed = failpoint::arm("build");
        let cache = self.config.cache_dir.clone().unwrap_or_else(|| self.store.cache());
        let (guest, say) = (self.config.guest_binary.clone(), Arc::clone(build));
        let recipe = keiki_image::RootfsSpec { disk_mib: shape.disk_mib, ..spec.rootfs() };
        let refresh = request.force;
        let parts = tokio::task::spawn_blocking(move || {
            let builder = Builder::new(cache, Arc::new(move |line: &str| say.say(line))).refresh(refresh);
            builder.template(&recipe, &guest)
        });
        let parts = parts
            .await
            .map_err(|cause| Error::internal("the build was interrupted", cause))?
            .map_err(|cause| Error::internal(format!("template {} cannot be built", spec.name), cause))?;
        let version = version_of(&parts.digest, &spec.warm, shape, &self.engine_version);
        let current = self.templates.state().baked.get(&spec.name).map(|baked| baked.record.version.clone());
        // Another bake of the same contents has the time behind its version.
        let is_same = current.is_some_and(|current| current.starts_with(&version));
        if is_same && !request.force && !request.rebake {
            build.say("nothing to do: it is baked from exactly this already");
            return Ok(());
        }
        build.update(|progress| progress.view.status = "baking".into());
        let version = if is_same {
            format!("{version}-{}", OffsetDateTime::now_utc().unix_timestamp())
        } else {
            version
        };
        let dir = self.store.template(&spec.name, &version);
        let claim = self.sources.claim(&dir).await;
        self.store.remove(dir.clone()).await?;
        drop(claim);
        let recipe = Recipe { spec, shape, version: &version, parts: &parts };
        let baked = self.bake(&recipe, &dir, build).await;
        match baked {
            Ok(record) => self.install_template(record, build).await,
            Err(error) => {
                self.store.remove(dir).await?;
                Err(error)
            }
        }
    }

    async fn install_template(self: &Arc<Self>, record: TemplateRecord, build: &Building) -> Result<()> {
        let dir = self.store.template(&record.name, &record.version);
        let frozen = self.fleet.load(&dir, Sharing::Node).await?;
        failpoint::reach("load");
        self.records.put(vec![record.clone()]).await?;
        build.say(&format!("done: {} version {}", record.name, record.version));
        let baked = Baked::new(record.clone(), frozen);
        let old = self.templates.state().baked.insert(record.name.clone(), Arc::clone(&baked));
        if let Some(old) = old {
            self.retire(&old).await?;
        }
        self.refill(&baked);
        Ok(())
    }

    /// Ends the VMs ahead of a template version and removes its files; machines made from it live on.
    async fn retire(&self, old: &Baked) -> Result<()> {
        self.close_ahead(old).await;
        let dir = self.dir_of(old);
        let _claim = self.sources.claim(&dir).await;
        self.fleet.engine.forget(&dir).await;
        self.store.remove(dir).await
    }

    fn dir_of(&self, baked: &Baked) -> PathBuf {
        self.store.template(&baked.record.name, &baked.record.version)
    }

    async fn close_ahead(&self, baked: &Baked) {
        let ready = {
            let mut ahead = baked.ahead.lock();
            ahead.closed = true;
            std::mem::take(&mut ahead.ready)
        };
        for prepared in ready {
            self.fleet.cancel(prepared).await;
        }
    }

    /// Gives running builds up and ends the VMs ahead, for a node that stops.
    pub(super) async fn close_templates(&self) {
        self.templates.building.lock().await.shutdown().await;
        let all: Vec<_> = self.templates.state().baked.values().cloned().collect();
        for baked in all {
            self.close_ahead(&baked).await;
        }
    }

    pub(super) async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        // Until it is gone no build begins: that one would write where this one removes.
        let _no_build = self.templates.building.lock().await;
        if self.templates.running(name.as_str()).is_some() {
            return Err(Error::Conflict(format!("template {name} is being built")));
        }
        let _armed = failpoint::arm("delete_template");
        let baked = self.templates.state().baked.remove(name.as_str());
        let baked = baked.ok_or_else(|| Error::NotFound(format!("no template {name}")))?;
        self.records.remove::<TemplateRecord>(vec![name.as_str().into()]).await?;
        self.retire(&baked).await
    }

    /// Opens a recorded template at start. One that cannot be used here any more (another engine version, a
    /// damaged file) is forgotten: it will be baked anew when it is wanted.
    pub(super) async fn open_template(self: &Arc<Self>, record: TemplateRecord) -> Result<()> {
        let dir = self.store.template(&record.name, &record.version);
        match self.fleet.load(&dir, Sharing::Node).await {
            Ok(frozen) => {
                let baked = Baked::new(record.clone(), frozen);
                self.templates.state().baked.insert(record.name, Arc::clone(&baked));
                self.refill(&baked);
                Ok(())
            }
            Err(error) => {
                tracing::warn!(
                    template = record.name,
                    error = &error as &dyn std::error::Error,
                    "must be baked anew"
                );
                self.records.remove::<TemplateRecord>(vec![record.name.clone()]).await?;
                self.store.remove(self.store.template(&record.name, &record.version)).await
            }
        }
    }

    /// Prepares VMs in the background until as many wait as are configured.
    pub(super) fn refill(self: &Arc<Self>, baked: &Arc<Baked>) {
        let missing = {
            let mut ahead = baked.ahead.lock();
            if ahead.closed {
                return;
            }
            let missing = self.config.seats_ahead.saturating_sub(ahead.ready.len() + ahead.making);
            ahead.making += missing;
            missing
        };
        if missing == 0 {
            return;
        }
        let (node, baked) = (Arc::clone(self), Arc::clone(baked));
        let counted = self.under_way.token();
        tokio::spawn(async move {
            let _counted = counted;
            tokio::time::sleep(REFILL_PAUSE).await;
            for _ in 0..missing {
                let _held = node.sources.hold(&node.dir_of(&baked)).await;
                if baked.ahead.lock().closed {
                    return;
                }
                let prepared = node.fleet.prepare(SandboxId::new(), baked.frozen.image()).await;
                if let Some(unwanted) = baked.keep_ahead(prepared) {
                    node.fleet.cancel(unwanted).await;
                }
            }
        });
    }
}

fn version_of(digest: &str, warm: &[String], shape: Shape, engine: &str) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    // The digest names the contents; what else decides whether a bake can be reused is folded in.
    let mut hasher = DefaultHasher::new();
    (digest, warm, shape, engine).hash(&mut hasher);
    // First what tells two shapes of the same contents apart: tables show the beginning.
    let contents: String = digest.chars().take(12).collect();
    format!("{:08x}-{contents}", hasher.finish() >> 32)
}

fn view(record: &TemplateRecord) -> Template {
    Template {
        name: record.name.clone(),
        version: record.version.clone(),
        cpu: record.shape.vcpus,
        memory_mb: record.shape.memory_mib,
        disk_mb: record.shape.disk_mib,
        size_bytes: record.size_bytes,
        status: "ready".into(),
        description: record.description.clone(),
        created_at: rfc3339(record.created_at),
        cold_boot_ms: Some(record.cold_boot_ms),
        kernel: record.kernel.clone(),
    }
}

fn missing(spec: &TemplateSpec) -> Template {
    Template {
        name: spec.name.clone(),
        version: String::new(),
        cpu: spec.shape.vcpus,
        memory_mb: spec.shape.memory_mib,
        disk_mb: spec.shape.disk_mib,
        size_bytes: 0,
        status: "missing".into(),
        description: spec.description.clone(),
        created_at: String::new(),
        cold_boot_ms: None,
        kernel: String::new(),
    }
}
