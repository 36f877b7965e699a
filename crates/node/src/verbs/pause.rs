//! Pause: a freeze without the copy. Resume: the machine continues.

use super::machine_of;
use crate::{
    daemon::Inner,
    error::Result,
    fleet::engine_error,
    freeze::Still,
    lifecycle::{Decision, Verb},
    sandbox::Sandbox,
    timings::timings,
};
use keiki_sys::{failpoint::arm, stopwatch::Stopwatch};
use keiki_types::{
    SandboxId, Status,
    api::{self, EventKind},
};

impl Inner {
    pub(crate) async fn pause(&self, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandboxes.get(id)?;
        let _verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Pause)? == Decision::Go {
            let live = machine_of(&sandbox)?;
            let _armed = arm("pause");
            let mut watch = Stopwatch::start();
            let still = Still::hold(&live.guest, &mut watch).await?;
            if let Err(error) = live.machine.pause().await {
                still.release(&mut watch).await?;
                return Err(engine_error("the machine cannot be paused", error));
            }
            watch.lap("park");
            self.change_status(&sandbox, Status::Paused, EventKind::Paused, watch).await?;
        }
        Ok(sandbox.view())
    }

    pub(crate) async fn resume(&self, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandboxes.get(id)?;
        let _verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Resume)? == Decision::Go {
            let live = machine_of(&sandbox)?;
            let _armed = arm("resume");
            let mut watch = Stopwatch::start();
            let resumed = live.machine.resume().await;
            resumed.map_err(|error| engine_error("the machine cannot be resumed", error))?;
            watch.lap("unpark");
            live.guest.thaw_user().await?;
            watch.lap("thaw_user");
            self.change_status(&sandbox, Status::Running, EventKind::Resumed, watch).await?;
        }
        Ok(sandbox.view())
    }

    async fn change_status(
        &self,
        sandbox: &Sandbox,
        status: Status,
        kind: EventKind,
        mut watch: Stopwatch,
    ) -> Result<()> {
        let record = sandbox.update(|record| record.status = status);
        sandbox.touch();
        self.journal.records.put(vec![record]).await?;
        watch.lap("record");
        let verb = if kind == EventKind::Paused { "pause" } else { "resume" };
        self.journal.done(verb, &sandbox.id.to_string(), &timings(&watch));
        self.journal.emit(sandbox.id, kind, |_| {});
        Ok(())
    }
}
