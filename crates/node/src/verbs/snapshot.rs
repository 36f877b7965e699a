//! Snapshot: one freeze, written to disk. The sandbox keeps running.

use crate::{
    daemon::Inner,
    error::{Error, Result},
    freeze::{After, Taken, disk_bytes},
    guest::secrets,
    once::{self, Once},
    records::{SandboxRecord, SnapshotRecord},
    sandbox::{Live, Sandbox},
    store::tree_bytes,
};
use keiki_sys::{failpoint::arm, stopwatch::Stopwatch};
use keiki_types::{
    SandboxId, SnapshotId,
    api::{self, EventKind},
};
use std::sync::Arc;
use time::OffsetDateTime;

impl Inner {
    pub(crate) async fn snapshot(
        self: &Arc<Self>,
        id: SandboxId,
        once: Option<&Once>,
    ) -> Result<api::Snapshot> {
        let _armed = arm("snapshot");
        let mut watch = Stopwatch::start();
        let sandbox = self.sandboxes.get(id)?;
        let (_verb, live) = self.freezable(&sandbox).await?;
        let _room = self.fleet.reserve_disk(disk_bytes(live.machine.shape(), 0))?;
        let snapshot = SnapshotId::new();
        let taken = self.take_snapshot(&sandbox, &live, snapshot, once, &mut watch).await;
        let (record, taken) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                self.store.remove_or_log(self.store.snapshot(snapshot)).await;
                return Err(error);
            }
        };
        let timings = taken.pause.of_verb(&watch);
        self.journal.done("snapshot", &id.to_string(), &timings);
        self.journal.emit(id, EventKind::Snapshotted, |event| {
            event.snapshot_id = Some(snapshot);
            event.ms = Some(timings.total_ms);
        });
        Ok(api::Snapshot { timings: Some(timings), ..self.snapshot_view(&record) })
    }

    async fn take_snapshot(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        id: SnapshotId,
        once: Option<&Once>,
        watch: &mut Stopwatch,
    ) -> Result<(SnapshotRecord, Taken)> {
        let record = sandbox.record();
        let dir = self.store.snapshot(id);
        let image = self.fleet.image(&dir, record.shape).await?;
        let (out, run_dir) = (secrets::not_in_snapshots(&record), self.store.run(record.id));
        let after = if out.is_empty() { After::GoesOn } else { After::KeepsSecrets(&out, &run_dir) };
        let taken = self.freeze(sandbox, live, image, after, watch).await?;
        self.fleet.persist(taken.frozen.as_ref()).await?;
        watch.lap("persist");
        let snapshot = SnapshotRecord {
            id,
            sandbox_id: record.id,
            template: record.template,
            template_version: record.template_version,
            shape: record.shape,
            created_at: OffsetDateTime::now_utc(),
            size_bytes: tree_bytes(&dir),
            parent_snapshot_id: record.parent_snapshot_id,
            generation: record.generation,
            engine: record.engine,
            metadata: record.metadata,
            secrets: record.secrets,
            kernel: record.kernel,
        };
        // From here on the sandbox descends from this snapshot as far as its later copies are
        // concerned.
        let descended = SandboxRecord { parent_snapshot_id: Some(id), ..sandbox.record() };
        let request = once.map(|once| once::record(once, [id]));
        self.journal.records.put_all(vec![snapshot.clone()], vec![descended], request).await?;
        sandbox.update(|record| record.parent_snapshot_id = Some(id));
        watch.lap("record");
        Ok((snapshot, taken))
    }

    pub(crate) async fn snapshot_record(&self, id: SnapshotId) -> Result<SnapshotRecord> {
        let record = self.journal.records.get(&id.to_string()).await?;
        record.ok_or_else(|| Error::NotFound(format!("no snapshot {id}")))
    }

    pub(crate) async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        let _armed = arm("delete_snapshot");
        self.snapshot_record(id).await?;
        self.journal.records.remove::<SnapshotRecord>(vec![id.to_string()]).await?;
        let dir = self.store.snapshot(id);
        let _claim = self.sources.claim(&dir).await;
        self.fleet.engine.forget(&dir).await;
        self.store.remove(dir).await
    }
}
