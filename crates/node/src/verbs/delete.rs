//! Delete: the end of a sandbox.

use crate::{
    daemon::Inner, error::Result, lifecycle::Verb, records::SandboxRecord, sandbox::Sandbox, timings::timings,
};
use keiki_sys::{failpoint::arm, stopwatch::Stopwatch};
use keiki_types::{SandboxId, Status, api::EventKind};

impl Inner {
    pub(crate) async fn delete(&self, id: SandboxId) -> Result<()> {
        let sandbox = self.sandboxes.get(id)?;
        let _verb = sandbox.verb.lock().await;
        sandbox.decide(Verb::Delete)?;
        let before = sandbox.record().status;
        sandbox.update(|record| record.status = Status::Stopping);
        self.delete_claimed(&sandbox, before).await
    }

    /// Deletes a sandbox that is `stopping` and was `before` until then; call with its verb held. On error it
    /// is as before.
    pub(crate) async fn delete_claimed(&self, sandbox: &Sandbox, before: Status) -> Result<()> {
        let _armed = arm("delete");
        let mut watch = Stopwatch::start();
        let record = sandbox.record();
        // Removed from the records first: a crash from here on finishes the removal at the next start.
        if let Err(error) = self.journal.records.remove::<SandboxRecord>(vec![record.id.to_string()]).await {
            sandbox.update(|record| record.status = before);
            return Err(error);
        }
        watch.lap("record");
        match sandbox.live() {
            Some(live) => self.fleet.end(&live).await,
            None => self.fleet.clear(record.id, None).await,
        }
        sandbox.set_live(None, |record| record.status = Status::Deleted);
        let hibernated = self.store.hibernated(record.id, record.generation);
        self.fleet.engine.forget(&hibernated).await;
        self.store.remove_or_log(hibernated).await;
        self.sandboxes.remove(record.id);
        watch.lap("stop");
        self.journal.done("delete", &record.id.to_string(), &timings(&watch));
        self.journal.emit(record.id, EventKind::Deleted, |_| {});
        Ok(())
    }
}
