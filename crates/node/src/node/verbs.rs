//! The verbs that thaw or end machines: create, restore, wake, pause, resume, delete, promote.

use super::{
    Inner, Sharing,
    freeze::released_timings,
    machine::{Place, engine_error, identity_of},
    request, secrets,
};
use crate::{
    clock::Clock,
    error::{Error, Result},
    guest::Secrets,
    lifecycle::{Decision, Verb},
    once::Once,
    records::{SandboxRecord, SnapshotRecord},
    sandbox::{Live, Sandbox, Use},
};
use keiki_engine::{Frozen, SharingScope};
use keiki_sys::failpoint::arm;
use keiki_types::{
    Origin, SandboxId, SnapshotId, Status, TemplateName,
    api::{self, CreateSandbox, EventKind, Promote, Promoted},
};
use std::{collections::BTreeMap, sync::Arc};
use time::OffsetDateTime;

/// Space that a restored machine needs before it writes anything of its own.
const RESTORE_DISK_BYTES: u64 = 16 << 20;

impl Inner {
    pub(super) async fn create(
        self: &Arc<Self>,
        asked: CreateSandbox,
        once: Option<&Once>,
    ) -> Result<api::Sandbox> {
        let _armed = arm(if asked.from_snapshot.is_some() { "restore" } else { "create" });
        let mut clock = Clock::start();
        let (ttl_seconds, metadata) = request::create(&asked)?;
        let base = self.blank_record(ttl_seconds, metadata, asked.persistent.unwrap_or(false));
        match &asked.from_snapshot {
            Some(id) => {
                let id =
                    id.parse::<SnapshotId>().map_err(|_| Error::NotFound(format!("no snapshot {id}")))?;
                let dir = self.store.snapshot(id);
                let _held = self.sources.hold(&dir).await;
                let snapshot = self.snapshot_record(id).await?;
                self.refuse_old(&snapshot)?;
                request::shape(&asked, &snapshot.template, snapshot.shape)?;
                let _room = self.reserve_disk(RESTORE_DISK_BYTES)?;
                let (secrets, has) =
                    secrets::of_copy(&snapshot.secrets, |fates| fates.on_restore, asked.secrets)?;
                let record = SandboxRecord {
                    secrets: has,
                    template: snapshot.template,
                    template_version: snapshot.template_version,
                    kernel: snapshot.kernel,
                    shape: snapshot.shape,
                    from_snapshot: Some(id),
                    parent_snapshot_id: Some(id),
                    origin: Origin::Restore,
                    ..base
                };
                let frozen = self.load(&dir).await?;
                clock.lap("load");
                self.bring_up(record, secrets, frozen.as_ref(), None, once, &mut clock).await
            }
            None => {
                let name = asked.template.as_deref().unwrap_or("base");
                let name: TemplateName =
                    name.parse().map_err(|error| Error::Invalid(format!("template: {error}")))?;
                let (baked, _held) = self.baked(&name).await?;
                request::shape(&asked, name.as_str(), baked.record.shape)?;
                let _room = self.reserve_disk(RESTORE_DISK_BYTES)?;
                let (secrets, has) =
                    secrets::of_copy(&BTreeMap::new(), |fates| fates.on_fork, asked.secrets)?;
                let record = SandboxRecord {
                    secrets: has,
                    template: baked.record.name.clone(),
                    template_version: baked.record.version.clone(),
                    kernel: baked.record.kernel.clone(),
                    shape: baked.record.shape,
                    ..base
                };
                let place = baked.take_place();
                let record =
                    SandboxRecord { id: place.as_ref().map_or(record.id, |place| place.id), ..record };
                clock.lap("admit");
                let made =
                    self.bring_up(record, secrets, baked.frozen.as_ref(), place, once, &mut clock).await;
                self.refill(&baked);
                made
            }
        }
    }

    /// A sandbox of nothing yet.
    fn blank_record(
        &self,
        ttl_seconds: u64,
        metadata: BTreeMap<String, String>,
        persistent: bool,
    ) -> SandboxRecord {
        SandboxRecord {
            id: SandboxId::new(),
            template: String::new(),
            template_version: String::new(),
            shape: keiki_types::Shape { vcpus: 0, memory_mib: 0, disk_mib: 0 },
            status: Status::Creating,
            created_at: OffsetDateTime::now_utc(),
            metadata,
            from_snapshot: None,
            parent_sandbox_id: None,
            parent_snapshot_id: None,
            origin: Origin::Create,
            boot_ms: 0,
            persistent,
            ttl_seconds,
            generation: 0,
            engine: self.engine.kind(),
            slot: None,
            timings: None,
            error: None,
            secrets: BTreeMap::new(),
            kernel: String::new(),
        }
    }

    /// Records, thaws, releases, records. A failed attempt leaves nothing.
    async fn bring_up(
        self: &Arc<Self>,
        record: SandboxRecord,
        secrets: Secrets,
        frozen: &dyn Frozen,
        place: Option<Place>,
        once: Option<&Once>,
        clock: &mut Clock,
    ) -> Result<api::Sandbox> {
        let prepared = async {
            let ticket = self.admission.admit(record.shape, 1)?.pop();
            let ticket =
                ticket.ok_or_else(|| Error::NoRoom("insufficient host memory for sandbox".into()))?;
            let generation = self.records.generation().await?;
            let record = SandboxRecord { generation, ..record };
            self.records.put(vec![record.clone()]).await?;
            Ok((ticket, record))
        };
        let (ticket, record) = match prepared.await {
            Ok(prepared) => prepared,
            Err(error) => {
                if let Some(place) = place {
                    self.vacate(place).await;
                }
                return Err(error);
            }
        };
        clock.lap("record");
        self.announce(&record);
        let made = async {
            let place = match place {
                Some(place) => place,
                None => self.place(record.id, frozen.image()).await?,
            };
            clock.lap("place");
            self.thaw(frozen, place, identity_of(&record), secrets, ticket, clock).await
        };
        match made.await {
            Ok(live) => self.come_up(record, live, once, clock).await,
            Err(error) => {
                self.forget(&[record], &error).await;
                Err(error)
            }
        }
    }

    /// Lists a sandbox that is being made.
    pub(super) fn announce(&self, record: &SandboxRecord) {
        self.list_it(Sandbox::new(record.clone(), None));
        self.tell(record.id, EventKind::Created, |event| {
            event.parent_sandbox_id = record.parent_sandbox_id;
            event.snapshot_id = record.from_snapshot;
        });
    }

    async fn come_up(
        self: &Arc<Self>,
        record: SandboxRecord,
        live: Live,
        once: Option<&Once>,
        clock: &mut Clock,
    ) -> Result<api::Sandbox> {
        let record = SandboxRecord {
            status: Status::Running,
            slot: live.slot_index(),
            boot_ms: u64::try_from(clock.elapsed().as_millis()).unwrap_or(u64::MAX),
            timings: Some(released_timings(clock, None)),
            ..record
        };
        let request = once.map(|once| crate::once::record(once, [record.id]));
        if let Err(error) = self.records.put_made(vec![record.clone()], request).await {
            self.end_live(record.id, &live).await;
            self.forget(&[record], &error).await;
            return Err(error);
        }
        clock.lap("record");
        let timings = clock.timings();
        self.done(record.origin.as_str(), &record.id.to_string(), &timings);
        self.tell(record.id, EventKind::Running, |event| event.ms = Some(timings.total_ms));
        Ok(self.adopt_live(record, live).view())
    }

    pub(super) async fn wake(self: &Arc<Self>, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandbox(id)?;
        let _verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Wake)? == Decision::Go {
            self.wake_locked(&sandbox).await?;
        }
        Ok(sandbox.view())
    }

    /// Wakes a hibernated sandbox; call with its verb held. On error it stays hibernated.
    pub(super) async fn wake_locked(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<()> {
        let _armed = arm("wake");
        let mut clock = Clock::start();
        let record = sandbox.record();
        let ticket = self.admission.admit(record.shape, 1)?.pop();
        let ticket = ticket.ok_or_else(|| Error::NoRoom("insufficient host memory for sandbox".into()))?;
        let _room = self.reserve_disk(RESTORE_DISK_BYTES)?;
        let source = self.store.hibernated(record.id, record.generation);
        let frozen = self.load(&source).await?;
        let generation = self.records.generation().await?;
        let place = self.place(record.id, frozen.image()).await?;
        let woken = SandboxRecord { origin: Origin::Wake, generation, ..record.clone() };
        let (identity, secrets) = (identity_of(&woken), secrets::of_woken(&record));
        let live = self.thaw(frozen.as_ref(), place, identity, secrets, ticket, &mut clock).await?;
        let woken = SandboxRecord {
            status: Status::Running,
            origin: Origin::Wake,
            generation,
            slot: live.slot_index(),
            boot_ms: u64::try_from(clock.elapsed().as_millis()).unwrap_or(u64::MAX),
            timings: Some(released_timings(&clock, None)),
            ..record
        };
        if let Err(error) = self.records.put(vec![woken.clone()]).await {
            self.end_live(woken.id, &live).await;
            return Err(error);
        }
        let timings = clock.timings();
        self.done("wake", &woken.id.to_string(), &timings);
        self.tell(woken.id, EventKind::Woken, |event| event.ms = Some(timings.total_ms));
        let live = Arc::new(live);
        sandbox.set_live(Some(Arc::clone(&live)), |record| *record = woken);
        self.watch(Arc::clone(sandbox), live);
        self.engine.forget(&source).await;
        self.store.remove_or_log(source).await;
        Ok(())
    }

    pub(super) async fn pause(self: &Arc<Self>, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandbox(id)?;
        let _verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Pause)? == Decision::Go {
            let live = self.machine_of(&sandbox)?;
            let _armed = arm("pause");
            let mut clock = Clock::start();
            // In the order of a freeze, so that a paused machine can be copied like a frozen one.
            live.guest.flush().await?;
            clock.lap("flush");
            live.guest.freeze_user().await?;
            clock.lap("freeze_user");
            if let Err(error) = live.machine.pause().await {
                live.guest.thaw_user().await?;
                return Err(engine_error("the machine cannot be paused", error));
            }
            clock.lap("park");
            self.settle(&sandbox, Status::Paused).await?;
            clock.lap("record");
            self.done("pause", &id.to_string(), &clock.timings());
            self.tell(id, EventKind::Paused, |_| {});
        }
        Ok(sandbox.view())
    }

    pub(super) async fn resume(self: &Arc<Self>, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandbox(id)?;
        let _verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Resume)? == Decision::Go {
            let live = self.machine_of(&sandbox)?;
            let _armed = arm("resume");
            let mut clock = Clock::start();
            live.machine
                .resume()
                .await
                .map_err(|error| engine_error("the machine cannot be resumed", error))?;
            clock.lap("unpark");
            live.guest.thaw_user().await?;
            clock.lap("thaw_user");
            self.settle(&sandbox, Status::Running).await?;
            clock.lap("record");
            self.done("resume", &id.to_string(), &clock.timings());
            self.tell(id, EventKind::Resumed, |_| {});
        }
        Ok(sandbox.view())
    }

    async fn settle(&self, sandbox: &Sandbox, status: Status) -> Result<()> {
        let record = sandbox.update(|record| record.status = status);
        sandbox.touch();
        self.records.put(vec![record]).await
    }

    pub(super) async fn delete(&self, id: SandboxId) -> Result<()> {
        let sandbox = self.sandbox(id)?;
        let _verb = sandbox.verb.lock().await;
        sandbox.decide(Verb::Delete)?;
        let before = sandbox.record().status;
        sandbox.update(|record| record.status = Status::Stopping);
        self.delete_claimed(&sandbox, before).await
    }

    /// Deletes a sandbox that is `stopping` and was `before` until then; call with its verb held. On error it
    /// is as before.
    pub(super) async fn delete_claimed(&self, sandbox: &Sandbox, before: Status) -> Result<()> {
        let _armed = arm("delete");
        let mut clock = Clock::start();
        let record = sandbox.record();
        // Removed from the records first: a crash from here on finishes the removal at the next start.
        if let Err(error) = self.records.remove::<SandboxRecord>(vec![record.id.to_string()]).await {
            sandbox.update(|record| record.status = before);
            return Err(error);
        }
        clock.lap("record");
        if let Some(live) = sandbox.live() {
            self.end_live(record.id, &live).await;
        } else {
            self.clear_ground(record.id, None).await;
        }
        sandbox.set_live(None, |record| record.status = Status::Deleted);
        let hibernated = self.store.hibernated(record.id, record.generation);
        self.engine.forget(&hibernated).await;
        self.store.remove_or_log(hibernated).await;
        self.unlist(record.id);
        clock.lap("stop");
        self.done("delete", &record.id.to_string(), &clock.timings());
        self.tell(record.id, EventKind::Deleted, |_| {});
        Ok(())
    }

    pub(super) async fn promote(&self, id: SandboxId, promote: Promote) -> Result<Promoted> {
        let _armed = arm("promote");
        let winner = self.sandbox(id)?.record();
        let tree_id = promote.tree_id.or_else(|| winner.metadata.get("fork_tree_id").cloned());
        let tree_id = tree_id.ok_or_else(|| {
            Error::Invalid(format!(
                "tree_id: sandbox {id} is no child of a fork-tree, so the tree must be named"
            ))
        })?;
        let (mut deleted, mut failures) = (Vec::new(), BTreeMap::new());
        if promote.cleanup_siblings {
            for sibling in self.sandboxes() {
                let in_tree = sibling.record().metadata.get("fork_tree_id") == Some(&tree_id);
                if in_tree && sibling.id != id {
                    match self.delete(sibling.id).await {
                        Ok(()) => deleted.push(sibling.id),
                        Err(error) => drop(failures.insert(sibling.id.to_string(), error.to_string())),
                    }
                }
            }
        }
        Ok(Promoted { winner: id, tree_id, deleted, failures })
    }

    pub(super) async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        let _armed = arm("delete_snapshot");
        self.snapshot_record(id).await?;
        self.records.remove::<SnapshotRecord>(vec![id.to_string()]).await?;
        let dir = self.store.snapshot(id);
        let _claim = self.sources.claim(&dir).await;
        self.engine.forget(&dir).await;
        self.store.remove(dir).await
    }

    pub(super) async fn snapshot_record(&self, id: SnapshotId) -> Result<SnapshotRecord> {
        let record = self.records.get(&id.to_string()).await?;
        record.ok_or_else(|| Error::NotFound(format!("no snapshot {id}")))
    }

    /// Opens what a user of this node froze.
    pub(super) async fn load(&self, dir: &std::path::Path) -> Result<Arc<dyn Frozen>> {
        self.load_for(dir, Sharing::Workspace).await
    }

    /// Opens a frozen machine whose memory may be shared in this scope, and in none wider than the node's.
    pub(super) async fn load_for(&self, dir: &std::path::Path, sharing: Sharing) -> Result<Arc<dyn Frozen>> {
        let scope = match (self.config.sharing, sharing) {
            (Sharing::None, _) | (_, Sharing::None) => SharingScope::None,
            (Sharing::Node, Sharing::Node) => SharingScope::Node,
            // A node has one workspace.
            _ => SharingScope::Workspace("default".into()),
        };
        self.engine
            .load(dir, scope)
            .await
            .map_err(|error| engine_error("the snapshot cannot be loaded", error))
    }

    fn machine_of(&self, sandbox: &Sandbox) -> Result<Arc<Live>> {
        sandbox.live().ok_or_else(|| Error::Conflict(format!("sandbox {} has no machine", sandbox.id)))
    }

    /// Begins a use of a sandbox, waking it if need be.
    pub(crate) async fn begin(self: &Arc<Self>, id: SandboxId) -> Result<Use> {
        let wake = || {
            let waking = Arc::clone(self);
            async move { self.to_the_end(async move { waking.wake(id).await }).await.map(drop) }
        };
        self.sandbox(id)?.begin(wake).await
    }
}
