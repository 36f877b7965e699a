//! Create: a baked template, or a snapshot, thawed into a new sandbox.

use super::RESTORE_DISK_BYTES;
use crate::{
    admission::Ticket,
    births::{Births, Draft},
    daemon::Inner,
    error::{Error, Result},
    guest::secrets,
    once::Once,
    records::SandboxRecord,
    sandbox::Sandbox,
};
use keiki_api::request;
use keiki_engine::Frozen;
use keiki_sys::{failpoint::arm, stopwatch::Stopwatch};
use keiki_types::{
    Origin, SandboxId, Shape, Sharing, SnapshotId, Status, TemplateName,
    api::{self, CreateSandbox},
};
use std::{collections::BTreeMap, sync::Arc};
use time::OffsetDateTime;

impl Inner {
    pub(crate) async fn create(
        self: &Arc<Self>,
        asked: CreateSandbox,
        once: Option<&Once>,
    ) -> Result<api::Sandbox> {
        match asked.from_snapshot.clone() {
            Some(snapshot) => self.restore(&snapshot, asked, once).await,
            None => self.create_from_template(asked, once).await,
        }
    }

    async fn create_from_template(
        self: &Arc<Self>,
        asked: CreateSandbox,
        once: Option<&Once>,
    ) -> Result<api::Sandbox> {
        let _armed = arm("create");
        let mut watch = Stopwatch::start();
        let blank = self.blank_record(&asked)?;
        let name = asked.template.as_deref().unwrap_or("base");
        let name: TemplateName =
            name.parse().map_err(|error| Error::Invalid(format!("template: {error}")))?;
        let (baked, _held) = self.baked(&name).await?;
        let template = &baked.record;
        request::shape(&asked, name.as_str(), template.shape)?;
        let (secrets, has) = secrets::of_copy(&BTreeMap::new(), |fates| fates.on_fork, asked.secrets)?;
        // Before a prepared VM is taken: a refusal for lack of disk leaves it to the next create.
        let room = self.fleet.reserve_disk(RESTORE_DISK_BYTES)?;
        let ahead = baked.take_ahead();
        let sandbox = Sandbox::new(
            SandboxRecord {
                id: ahead.as_ref().map_or(blank.id, |prepared| prepared.id),
                secrets: has,
                template: template.name.clone(),
                template_version: template.version.clone(),
                kernel: template.kernel.clone(),
                shape: template.shape,
                ..blank
            },
            None,
        );
        watch.lap("admit");
        let births = Births::ahead(self, &sandbox, ahead, secrets, watch);
        let made = self.bring_up(births, room, &sandbox, baked.frozen.as_ref(), once).await;
        self.refill(&baked);
        made
    }

    async fn restore(
        self: &Arc<Self>,
        snapshot: &str,
        asked: CreateSandbox,
        once: Option<&Once>,
    ) -> Result<api::Sandbox> {
        let _armed = arm("restore");
        let mut watch = Stopwatch::start();
        let blank = self.blank_record(&asked)?;
        let id: SnapshotId =
            snapshot.parse().map_err(|_| Error::NotFound(format!("no snapshot {snapshot}")))?;
        let dir = self.store.snapshot(id);
        let _held = self.sources.hold(&dir).await;
        let snapshot = self.snapshot_record(id).await?;
        self.refuse_old(&snapshot)?;
        request::shape(&asked, &snapshot.template, snapshot.shape)?;
        let (secrets, has) = secrets::of_copy(&snapshot.secrets, |fates| fates.on_restore, asked.secrets)?;
        let sandbox = Sandbox::new(
            SandboxRecord {
                secrets: has,
                template: snapshot.template,
                template_version: snapshot.template_version,
                kernel: snapshot.kernel,
                shape: snapshot.shape,
                from_snapshot: Some(id),
                parent_snapshot_id: Some(id),
                origin: Origin::Restore,
                ..blank
            },
            None,
        );
        let room = self.fleet.reserve_disk(RESTORE_DISK_BYTES)?;
        let frozen = self.fleet.load(&dir, Sharing::Workspace).await?;
        watch.lap("load");
        let births = Births::new(self, &[Arc::clone(&sandbox)], secrets, watch);
        self.bring_up(births, room, &sandbox, frozen.as_ref(), once).await
    }

    async fn bring_up(
        &self,
        births: Births<Draft>,
        room: Ticket,
        sandbox: &Sandbox,
        frozen: &dyn Frozen,
        once: Option<&Once>,
    ) -> Result<api::Sandbox> {
        let mut births = births.reserve(room).await?;
        births.lap("record");
        let mut births = births.prepare(frozen.image()).await?;
        births.lap("place");
        let timings = births.thaw(frozen, None).await?.commit(once).await?;
        self.journal.done(sandbox.record().origin.as_str(), &sandbox.id.to_string(), &timings);
        Ok(sandbox.view())
    }

    /// A sandbox of nothing yet.
    fn blank_record(&self, asked: &CreateSandbox) -> Result<SandboxRecord> {
        let (ttl_seconds, metadata) = request::create(asked)?;
        Ok(SandboxRecord {
            id: SandboxId::new(),
            template: String::new(),
            template_version: String::new(),
            shape: Shape { vcpus: 0, memory_mib: 0, disk_mib: 0 },
            status: Status::Creating,
            created_at: OffsetDateTime::now_utc(),
            metadata,
            from_snapshot: None,
            parent_sandbox_id: None,
            parent_snapshot_id: None,
            origin: Origin::Create,
            boot_ms: 0,
            persistent: asked.persistent.unwrap_or(false),
            ttl_seconds,
            generation: 0,
            engine: self.fleet.engine.kind(),
            slot: None,
            timings: None,
            error: None,
            secrets: BTreeMap::new(),
            kernel: String::new(),
        })
    }
}
