//! Fork: one freeze, then a thaw for each child.

use crate::{
    births::{Births, Released, Reserved},
    daemon::Inner,
    error::Result,
    freeze::{After, disk_bytes},
    guest::secrets,
    once::Once,
    records::SandboxRecord,
    sandbox::{Live, Sandbox},
};
use keiki_api::request;
use keiki_sys::{failpoint::arm, stopwatch::Stopwatch};
use keiki_types::{
    Origin, SandboxId, Status,
    api::{EventKind, ForkSandbox, Forked, secrets::Fates},
};
use std::{collections::BTreeMap, iter, path::Path, sync::Arc};
use time::OffsetDateTime;

impl Inner {
    /// Children get these labels in addition to those of the request or the parent.
    pub(crate) async fn fork(
        self: &Arc<Self>,
        id: SandboxId,
        mut asked: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<&Once>,
    ) -> Result<Forked> {
        let _armed = arm("fork");
        let watch = Stopwatch::start();
        let count = request::fork_count(asked.count)?;
        let parent = self.sandboxes.get(id)?;
        let (verb, live) = self.freezable(&parent).await?;
        let original = parent.record();
        let (secrets, has) =
            secrets::of_copy(&original.secrets, |fates| fates.on_fork, asked.secrets.take())?;
        let record = child_of(&original, asked, labels, has)?;
        let child = || Sandbox::new(SandboxRecord { id: SandboxId::new(), ..record.clone() }, None);
        let first = child();
        let children: Vec<_> = iter::once(Arc::clone(&first)).chain((1..count).map(|_| child())).collect();

        let room = self.fleet.reserve_disk(disk_bytes(original.shape, count))?;
        let mut births = Births::new(self, &children, secrets, watch).reserve(room).await?;
        births.lap("admit");
        let scratch = self.store.scratch();
        let copied = self.copy_into(births, &parent, &live, &scratch).await;
        drop(verb);
        self.store.remove_or_log(scratch).await;
        let timings = copied?.commit(once).await?;

        self.journal.done("fork", &id.to_string(), &timings);
        self.journal.emit(id, EventKind::Forked, |event| {
            event.children = children.iter().map(|child| child.id).collect();
            event.ms = Some(timings.total_ms);
        });
        let children = children.iter().map(|child| child.view()).collect();
        Ok(Forked { parent_id: id, sandbox: first.view(), children, timings })
    }

    /// VMs first, while the parent runs; then one freeze; then all thaws.
    async fn copy_into(
        &self,
        births: Births<Reserved>,
        parent: &Sandbox,
        live: &Live,
        scratch: &Path,
    ) -> Result<Births<Released>> {
        let image = self.fleet.image(scratch, live.machine.shape()).await;
        let (births, image) = births.with(image).await?;
        let mut births = births.prepare(&image).await?;
        births.lap("places");
        let taken = self.freeze(parent, live, image, After::GoesOn, births.watch()).await;
        let (births, taken) = births.with(taken).await?;
        births.thaw(taken.frozen.as_ref(), Some(taken.pause)).await
    }
}

/// The first record of a child.
fn child_of(
    parent: &SandboxRecord,
    asked: ForkSandbox,
    labels: BTreeMap<String, String>,
    secrets: BTreeMap<String, Fates>,
) -> Result<SandboxRecord> {
    let mut metadata = asked.metadata.unwrap_or_else(|| parent.metadata.clone());
    metadata.extend(labels);
    Ok(SandboxRecord {
        status: Status::Creating,
        created_at: OffsetDateTime::now_utc(),
        metadata: request::metadata(metadata)?,
        ttl_seconds: request::ttl(asked.ttl_seconds, parent.ttl_seconds)?,
        secrets,
        parent_sandbox_id: Some(parent.id),
        from_snapshot: None,
        origin: Origin::Fork,
        slot: None,
        timings: None,
        error: None,
        boot_ms: 0,
        ..parent.clone()
    })
}
