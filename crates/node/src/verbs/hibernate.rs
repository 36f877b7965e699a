//! Hibernate: a freeze, written to disk, and the end of the machine. The sandbox keeps its id.

use super::machine_of;
use crate::{
    daemon::Inner,
    error::Result,
    freeze::{After, Taken, disk_bytes},
    lifecycle::{Decision, Verb},
    records::SandboxRecord,
    sandbox::{Live, Sandbox},
};
use keiki_sys::{failpoint::arm, stopwatch::Stopwatch};
use keiki_types::{
    SandboxId, Status,
    api::{self, EventKind},
};
use std::path::Path;

impl Inner {
    pub(crate) async fn hibernate(&self, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandboxes.get(id)?;
        let _verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Hibernate)? == Decision::Go {
            sandbox.touch();
            self.hibernate_locked(&sandbox, machine_of(&sandbox)?.as_ref()).await?;
        }
        Ok(sandbox.view())
    }

    /// Hibernates; call with the verb held and the decision made. Meanwhile new uses wait.
    pub(crate) async fn hibernate_locked(&self, sandbox: &Sandbox, live: &Live) -> Result<()> {
        sandbox.set_leaving(true);
        let done = self.hibernate_leaving(sandbox, live).await;
        sandbox.set_leaving(false);
        done
    }

    async fn hibernate_leaving(&self, sandbox: &Sandbox, live: &Live) -> Result<()> {
        let _armed = arm("hibernate");
        let mut watch = Stopwatch::start();
        let record = sandbox.record();
        let _room = self.fleet.reserve_disk(disk_bytes(record.shape, 0))?;
        let dir = self.store.hibernated(record.id, record.generation);
        let stored = self.store_machine(sandbox, live, &dir, &mut watch).await;
        let taken = match stored {
            Ok(taken) => taken,
            Err(error) => {
                self.store.remove_or_log(dir).await;
                if record.status == Status::Running {
                    live.guest.thaw_user().await?;
                }
                return Err(error);
            }
        };
        // Recorded: from here on it is hibernated, whatever happens to the machine.
        sandbox.set_live(None, |record| {
            record.status = Status::Hibernated;
            record.slot = None;
        });
        self.fleet.end(live).await;
        watch.lap("stop");
        let timings = taken.pause.of_verb(&watch);
        self.journal.done("hibernate", &record.id.to_string(), &timings);
        self.journal.emit(record.id, EventKind::Hibernated, |event| event.ms = Some(timings.total_ms));
        Ok(())
    }

    async fn store_machine(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        dir: &Path,
        watch: &mut Stopwatch,
    ) -> Result<Taken> {
        let record = sandbox.record();
        let image = self.fleet.image(dir, record.shape).await?;
        let taken = self.freeze(sandbox, live, image, After::Ends, watch).await?;
        self.fleet.persist(taken.frozen.as_ref()).await?;
        let hibernated = SandboxRecord { status: Status::Hibernated, slot: None, ..record };
        self.journal.records.put(vec![hibernated]).await?;
        Ok(taken)
    }
}
