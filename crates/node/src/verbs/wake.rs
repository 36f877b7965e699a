//! Wake: what a hibernation stored, thawed again.

use super::RESTORE_DISK_BYTES;
use crate::{
    births::Births,
    daemon::Inner,
    error::Result,
    guest::secrets,
    lifecycle::{Decision, Verb},
    sandbox::Sandbox,
};
use keiki_sys::{failpoint::arm, stopwatch::Stopwatch};
use keiki_types::{SandboxId, Sharing, api};
use std::sync::Arc;

impl Inner {
    pub(crate) async fn wake(self: &Arc<Self>, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandboxes.get(id)?;
        let _verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Wake)? == Decision::Go {
            self.wake_locked(&sandbox).await?;
        }
        Ok(sandbox.view())
    }

    /// Wakes a hibernated sandbox; call with its verb held. On error it stays hibernated.
    pub(crate) async fn wake_locked(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<()> {
        let _armed = arm("wake");
        let record = sandbox.record();
        let source = self.store.hibernated(record.id, record.generation);
        let room = self.fleet.reserve_disk(RESTORE_DISK_BYTES)?;
        let births = Births::again(self, sandbox, secrets::of_woken(&record), Stopwatch::start());
        let births = births.reserve(room).await?;
        let frozen = self.fleet.load(&source, Sharing::Workspace).await;
        let (births, frozen) = births.with(frozen).await?;
        let births = births.prepare(frozen.image()).await?;
        let timings = births.thaw(frozen.as_ref(), None).await?.commit(None).await?;
        self.journal.done("wake", &record.id.to_string(), &timings);
        self.fleet.engine.forget(&source).await;
        self.store.remove_or_log(source).await;
        Ok(())
    }
}
