//! A node in memory, for tests that need no guest: sandboxes, snapshots, files and events are
//! entries of a map, and commands are scripted. `keiki-fake-node` runs it as a program.
//!
//! One sandbox exists from the start ([`first_sandbox`]): it has five events, and no room for a snapshot. The template
//! `busy` is never ready.

mod guest;
mod web;

#[cfg(test)]
pub(crate) use guest::TRAPS;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use keiki_api::{Error, Host, Once, Previews, Result, Sandboxes, Secret, Templates, request, rfc3339};
use keiki_types::{
    EngineKind, SandboxId, Shape, SnapshotId, Status, TemplateName,
    api::{
        Build, BuildTemplate, CreateSandbox, Event, EventKind, ForkSandbox, Forked, Lifecycle, Promote,
        Promoted, Sandbox, SetLifecycle, Snapshot, Template, Timings, Version,
    },
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicUsize},
    time::{Duration, SystemTime},
};

/// How often a stream of events looks for new ones.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The node.
pub struct FakeNode {
    key: Option<String>,
    previews: Previews,
    /// The calls so far.
    pub(crate) calls: Arc<Mutex<Vec<String>>>,
    /// Named requests so far.
    pub(crate) named: Mutex<Vec<Once>>,
    pub(crate) files: Mutex<BTreeMap<(SandboxId, String), Vec<u8>>>,
    /// Commands that are being read.
    pub(crate) sessions: Arc<AtomicUsize>,
    /// What tests count over several routers of one node.
    #[cfg(test)]
    pub(crate) counters: crate::metrics::Metrics,
    sandboxes: Mutex<BTreeMap<SandboxId, Sandbox>>,
    snapshots: Mutex<BTreeMap<SnapshotId, Snapshot>>,
    events: Arc<Mutex<Vec<Event>>>,
    /// What named requests made, by their keys.
    made: Mutex<BTreeMap<String, (String, Vec<String>)>>,
}

impl Default for FakeNode {
    fn default() -> Self {
        let first = first_sandbox();
        Self {
            key: None,
            previews: previews(true),
            calls: Arc::default(),
            named: Mutex::default(),
            files: Mutex::default(),
            sessions: Arc::default(),
            #[cfg(test)]
            counters: crate::metrics::Metrics::default(),
            sandboxes: Mutex::new([(first, sandbox(first))].into()),
            snapshots: Mutex::default(),
            events: Arc::new(Mutex::new((1..=5).map(|seq| event(seq, first, EventKind::Paused)).collect())),
            made: Mutex::default(),
        }
    }
}

/// The sandbox that exists from the start.
///
/// # Panics
/// Never: the text is an id.
#[must_use]
pub fn first_sandbox() -> SandboxId {
    "0190b7a0-0000-7000-8000-000000000001".parse().expect("it is an id")
}

fn previews(is_open: bool) -> Previews {
    Previews::new([3; 32], "preview.test", is_open).expect("it is a domain name")
}

fn sandbox(id: SandboxId) -> Sandbox {
    Sandbox {
        id,
        template: "base".into(),
        template_version: "v".into(),
        cpu: 1,
        memory_mb: 256,
        disk_mb: 2048,
        status: Status::Running,
        guest_ip: String::new(),
        created_at: "2026-01-01T00:00:00Z".into(),
        metadata: [("of".into(), "parent".into())].into(),
        from_snapshot: None,
        boot_ms: 1,
        boot_mode: "create".into(),
        persistent: false,
        ttl_seconds: 3600,
        idle_seconds: 0,
        parent_sandbox_id: None,
        parent_snapshot_id: None,
        generation: 1,
        engine: EngineKind::Qemu,
        memory: None,
        cpu_ms: None,
        timings: None,
        error: None,
    }
}

fn event(seq: u64, sandbox_id: SandboxId, kind: EventKind) -> Event {
    Event {
        seq,
        at: "2026-01-01T00:00:00Z".into(),
        sandbox_id,
        kind,
        reason: None,
        ms: None,
        parent_sandbox_id: None,
        snapshot_id: None,
        children: Vec::new(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeNode {
    /// A node that asks for this key.
    #[must_use]
    pub fn with_key(key: Option<String>) -> Self {
        Self { previews: previews(key.is_none()), key, ..Self::default() }
    }

    fn note(&self, call: String) {
        lock(&self.calls).push(call);
    }

    fn known(&self, id: SandboxId) -> Result<Sandbox> {
        lock(&self.sandboxes).get(&id).cloned().ok_or_else(|| Error::NotFound(format!("no sandbox {id}")))
    }

    fn done(&self, id: SandboxId, call: String) -> Result<()> {
        self.known(id)?;
        self.note(call);
        Ok(())
    }

    fn tell(&self, id: SandboxId, kind: EventKind) {
        let mut events = lock(&self.events);
        let seq = events.len() as u64 + 1;
        events.push(Event { at: rfc3339(SystemTime::now().into()), ..event(seq, id, kind) });
    }

    fn add(&self, sandbox: Sandbox) -> Sandbox {
        self.tell(sandbox.id, EventKind::Created);
        self.tell(sandbox.id, EventKind::Running);
        lock(&self.sandboxes).insert(sandbox.id, sandbox.clone());
        sandbox
    }

    /// Changes a sandbox in one of these states; in `to` it stays as it is.
    fn turn(&self, id: SandboxId, from: &[Status], to: Status, kind: EventKind) -> Result<Sandbox> {
        let status = self.known(id)?.status;
        if status != to && !from.contains(&status) {
            return Err(Error::Conflict(format!("sandbox {id} is {}", status.as_str())));
        }
        if status != to {
            self.tell(id, kind);
        }
        let mut sandboxes = lock(&self.sandboxes);
        let sandbox = sandboxes.get_mut(&id).ok_or_else(|| Error::NotFound(format!("no sandbox {id}")))?;
        sandbox.status = to;
        Ok(sandbox.clone())
    }

    /// What a request of this name made before.
    fn again(&self, once: Option<&Once>) -> Result<Option<Vec<String>>> {
        let Some(once) = once else { return Ok(None) };
        lock(&self.named).push(once.clone());
        match lock(&self.made).get(&once.key) {
            Some((request, made)) if *request == once.request => Ok(Some(made.clone())),
            Some(_) => Err(Error::KeyTaken("this Idempotency-Key was used for another request".into())),
            None => Ok(None),
        }
    }

    fn remember(&self, once: Option<&Once>, made: impl IntoIterator<Item: ToString>) {
        if let Some(once) = once {
            let made = made.into_iter().map(|id| id.to_string()).collect();
            lock(&self.made).insert(once.key.clone(), (once.request.clone(), made));
        }
    }

    fn made(&self, ids: &[String]) -> Vec<Sandbox> {
        let ids = ids.iter().filter_map(|id| id.parse().ok());
        ids.filter_map(|id: SandboxId| self.known(id).ok()).collect()
    }
}

#[async_trait]
impl Host for FakeNode {
    fn version(&self) -> Version {
        Version { version: "0".into(), engine: "fake".into() }
    }

    fn authorize(&self, key: Option<&str>) -> Result<()> {
        if self.key.is_none() || self.key.as_deref() == key { Ok(()) } else { Err(Error::Unauthorized) }
    }

    fn previews(&self) -> &Previews {
        &self.previews
    }

    fn request_key(&self) -> Secret {
        [7; 32]
    }

    async fn metrics(&self) -> Result<String> {
        Ok(String::new())
    }

    async fn events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
        limit: Option<usize>,
    ) -> Result<Vec<Event>> {
        let all: Vec<Event> =
            lock(&self.events).iter().filter(|e| of.is_none_or(|id| e.sandbox_id == id)).cloned().collect();
        if all.is_empty() {
            of.map_or(Ok(()), |id| self.known(id).map(drop))?;
        }
        let fresh = all.into_iter().filter(|event| event.seq > since.unwrap_or(0));
        Ok(fresh.take(limit.unwrap_or(usize::MAX)).collect())
    }

    async fn follow_events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
    ) -> Result<BoxStream<'static, Event>> {
        self.events(of, since, None).await?;
        let events =
            stream::unfold((Arc::clone(&self.events), since.unwrap_or(0)), move |(all, seen)| async move {
                loop {
                    let next = lock(&all)
                        .iter()
                        .find(|e| e.seq > seen && of.is_none_or(|id| e.sandbox_id == id))
                        .cloned();
                    if let Some(next) = next {
                        let seen = next.seq;
                        return Some((next, (all, seen)));
                    }
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            });
        Ok(events.boxed())
    }
}

#[async_trait]
impl Sandboxes for FakeNode {
    async fn create(&self, asked: CreateSandbox, once: Option<Once>) -> Result<Sandbox> {
        if let Some(made) = self.again(once.as_ref())? {
            return self.made(&made).pop().ok_or_else(gone);
        }
        let (ttl_seconds, metadata) = request::create(&asked)?;
        let template = asked.template.unwrap_or_else(|| "base".into());
        match template.as_str() {
            "base" => {}
            "busy" => {
                return Err(Error::Busy {
                    why: "base is being built".into(),
                    retry_after: Duration::from_millis(1),
                });
            }
            "panic" => panic!("the fake node was told to"),
            other => return Err(Error::NotFound(format!("no template {other}"))),
        }
        let id = SandboxId::new();
        let made = Sandbox {
            ttl_seconds,
            metadata,
            template,
            persistent: asked.persistent.unwrap_or(false),
            created_at: rfc3339(SystemTime::now().into()),
            ..sandbox(id)
        };
        self.remember(once.as_ref(), [id]);
        Ok(self.add(made))
    }

    async fn list(&self, memory: bool) -> Result<Vec<Sandbox>> {
        self.note(format!("list {memory}"));
        Ok(lock(&self.sandboxes).values().rev().cloned().collect())
    }

    async fn get(&self, id: SandboxId) -> Result<Sandbox> {
        self.known(id)
    }

    async fn delete(&self, id: SandboxId) -> Result<()> {
        self.known(id)?;
        self.tell(id, EventKind::Deleted);
        lock(&self.sandboxes).remove(&id);
        Ok(())
    }

    async fn fork(
        &self,
        id: SandboxId,
        asked: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<Once>,
    ) -> Result<Forked> {
        let forked = |children: Vec<Sandbox>| {
            let sandbox = children.first().cloned().ok_or_else(gone)?;
            Ok(Forked { parent_id: id, sandbox, children, timings: Timings::default() })
        };
        if let Some(made) = self.again(once.as_ref())? {
            return forked(self.made(&made));
        }
        let count = request::fork_count(asked.count)?;
        let parent = self.known(id)?;
        self.note(format!("fork {asked:?}"));
        let mut metadata = request::metadata(asked.metadata.unwrap_or_else(|| parent.metadata.clone()))?;
        metadata.extend(labels);
        let ttl_seconds = request::ttl(asked.ttl_seconds, parent.ttl_seconds)?;
        let child = |_| {
            let (id, metadata) = (SandboxId::new(), metadata.clone());
            self.add(Sandbox {
                id,
                metadata,
                ttl_seconds,
                parent_sandbox_id: Some(parent.id),
                ..parent.clone()
            })
        };
        let children: Vec<Sandbox> = (0..count).map(child).collect();
        self.tell(id, EventKind::Forked);
        self.remember(once.as_ref(), children.iter().map(|child| child.id));
        forked(children)
    }

    async fn promote(&self, id: SandboxId, request: Promote) -> Result<Promoted> {
        self.done(id, format!("promote {request:?}"))?;
        Ok(Promoted { winner: id, tree_id: "t".into(), deleted: Vec::new(), failures: BTreeMap::new() })
    }

    async fn pause(&self, id: SandboxId) -> Result<Sandbox> {
        self.turn(id, &[Status::Running], Status::Paused, EventKind::Paused)
    }

    async fn resume(&self, id: SandboxId) -> Result<Sandbox> {
        self.turn(id, &[Status::Paused], Status::Running, EventKind::Resumed)
    }

    async fn hibernate(&self, id: SandboxId) -> Result<Sandbox> {
        self.turn(id, &[Status::Running], Status::Hibernated, EventKind::Hibernated)
    }

    async fn wake(&self, id: SandboxId) -> Result<Sandbox> {
        self.turn(id, &[Status::Hibernated], Status::Running, EventKind::Woken)
    }

    async fn lifecycle(&self, id: SandboxId) -> Result<Lifecycle> {
        let Sandbox { ttl_seconds, persistent, .. } = self.known(id)?;
        Ok(Lifecycle { ttl_seconds, persistent, idle_seconds: 0 })
    }

    async fn set_lifecycle(&self, id: SandboxId, asked: SetLifecycle) -> Result<Lifecycle> {
        self.done(id, format!("set_lifecycle {asked:?}"))?;
        if let Some(sandbox) = lock(&self.sandboxes).get_mut(&id) {
            sandbox.ttl_seconds = request::ttl(asked.ttl_seconds, sandbox.ttl_seconds)?;
            sandbox.persistent = asked.persistent.unwrap_or(sandbox.persistent);
        }
        self.lifecycle(id).await
    }

    async fn console(&self, id: SandboxId, _: usize) -> Result<Bytes> {
        self.known(id)?;
        Ok("hello é\nworld\n".into())
    }

    async fn snapshot(&self, id: SandboxId, once: Option<Once>) -> Result<Snapshot> {
        if let Some(made) = self.again(once.as_ref())? {
            let id = made.first().and_then(|id| id.parse().ok()).ok_or_else(gone)?;
            return self.get_snapshot(id).await;
        }
        let of = self.known(id)?;
        if id == first_sandbox() {
            return Err(Error::NoRoom("a snapshot needs 300 MiB; 10 MiB are free".into()));
        }
        let snapshot = Snapshot {
            id: SnapshotId::new(),
            sandbox_id: id,
            template: of.template,
            template_version: of.template_version,
            size_bytes: 0,
            created_at: rfc3339(SystemTime::now().into()),
            shape: Shape { vcpus: of.cpu, memory_mib: of.memory_mb, disk_mib: of.disk_mb },
            parent_snapshot_id: None,
            engine: of.engine,
            metadata: of.metadata,
            age_seconds: 0,
            kernel: String::new(),
            stale: Vec::new(),
            timings: None,
        };
        self.tell(id, EventKind::Snapshotted);
        self.remember(once.as_ref(), [snapshot.id]);
        lock(&self.snapshots).insert(snapshot.id, snapshot.clone());
        Ok(snapshot)
    }

    async fn snapshots(&self, of: Option<SandboxId>) -> Result<Vec<Snapshot>> {
        self.note(format!("snapshots {of:?}"));
        let all = lock(&self.snapshots);
        Ok(all
            .values()
            .rev()
            .filter(|snapshot| of.is_none_or(|id| snapshot.sandbox_id == id))
            .cloned()
            .collect())
    }

    async fn get_snapshot(&self, id: SnapshotId) -> Result<Snapshot> {
        lock(&self.snapshots).get(&id).cloned().ok_or_else(|| Error::NotFound(format!("no snapshot {id}")))
    }

    async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        lock(&self.snapshots)
            .remove(&id)
            .map(drop)
            .ok_or_else(|| Error::NotFound(format!("no snapshot {id}")))
    }
}

#[async_trait]
impl Templates for FakeNode {
    async fn templates(&self) -> Result<Vec<Template>> {
        Ok(vec![base_template()])
    }

    async fn get_template(&self, name: &TemplateName) -> Result<Template> {
        match name.as_str() {
            "base" => Ok(base_template()),
            _ => Err(Error::NotFound(format!("no template {name}"))),
        }
    }

    async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        Err(Error::NotFound(format!("no template {name}")))
    }

    async fn build_template(&self, request: BuildTemplate) -> Result<Build> {
        self.note(format!("build {request:?}"));
        Ok(Build {
            id: "b".into(),
            name: request.name,
            status: "queued".into(),
            error: String::new(),
            started_at: String::new(),
            ended_at: String::new(),
            step: String::new(),
        })
    }

    async fn builds(&self) -> Result<Vec<Build>> {
        Ok(Vec::new())
    }

    async fn get_build(&self, id: &str) -> Result<Build> {
        Err(Error::NotFound(format!("no build {id}")))
    }

    async fn build_log(&self, id: &str) -> Result<BoxStream<'static, String>> {
        match id {
            "b" => Ok(stream::iter(["one".to_owned(), "end".to_owned()]).boxed()),
            "slow" => Ok(stream::iter(["one".to_owned()]).chain(stream::pending()).boxed()),
            _ => Err(Error::NotFound(format!("no build {id}"))),
        }
    }
}

fn base_template() -> Template {
    Template {
        name: "base".into(),
        version: "v".into(),
        cpu: 1,
        memory_mb: 256,
        disk_mb: 2048,
        size_bytes: 0,
        status: "ready".into(),
        description: "A fake".into(),
        created_at: String::new(),
        cold_boot_ms: None,
        kernel: String::new(),
    }
}

fn gone() -> Error {
    Error::Conflict("what the request with this Idempotency-Key created has been deleted since".into())
}
