//! Recovery at startup from an earlier node: running machines continue, and everything incomplete
//! is removed. The records decide: what they do not name does not exist.

use crate::{
    daemon::Inner,
    error::{Error, Result},
    guest::{GuestLink, secrets::Out},
    records::{SandboxRecord, SnapshotRecord, TemplateRecord},
    sandbox::{Live, Sandbox},
};
use keiki_engine::Machine;
use keiki_sys::failpoint;
use keiki_types::{SandboxId, Status, api::EventKind};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
};

/// The earlier node may also have held secrets of it. A machine that does not accept them continues
/// without them.
async fn put_back_left(id: SandboxId, guest: &GuestLink, run: &Path) {
    let put = match Out::left(run) {
        Ok(Some(out)) => out.put_back(guest).await,
        Ok(None) => return,
        Err(error) => Err(error),
    };
    match put {
        Ok(()) => tracing::info!(%id, "restored secrets that an earlier node had removed for a freeze"),
        Err(error) => tracing::error!(%id, error = &error as &dyn std::error::Error, "secrets are lost"),
    }
}

impl Inner {
    pub(crate) async fn recover(self: &Arc<Self>, known: Vec<SandboxRecord>) -> Result<()> {
        let _armed = failpoint::arm("start");
        self.clear_scratch().await?;
        let mut named = HashSet::new();
        for record in known {
            match record.status {
                Status::Running | Status::Paused => self.recover_live(record.clone()).await?,
                // A machine may be left of a hibernation or wake that was cut short.
                Status::Hibernated | Status::Failed => {
                    self.end_leftovers(record.id).await?;
                    self.sandboxes.insert(&Sandbox::new(record.clone(), None));
                }
                Status::Creating | Status::Stopping | Status::Deleted => {
                    tracing::info!(id = %record.id, status = %record.status, "removing an incomplete directory");
                    self.end_leftovers(record.id).await?;
                    self.journal.records.remove::<SandboxRecord>(vec![record.id.to_string()]).await?;
                    continue;
                }
            }
            named.insert(record.id);
        }
        self.clear_unnamed(&named).await?;
        self.recover_snapshots().await?;
        self.recover_templates().await
    }

    /// A machine that should be running: adopts it, or marks its sandbox as failed.
    async fn recover_live(self: &Arc<Self>, record: SandboxRecord) -> Result<()> {
        let found = self.find(&record).await;
        match found {
            Ok(Some(live)) => {
                tracing::info!(id = %record.id, "found running");
                failpoint::reach("adopt");
                if record.status == Status::Running {
                    self.journal.emit(record.id, EventKind::Running, |_| {});
                }
                let sandbox = Sandbox::new(record.clone(), None);
                self.sandboxes.insert(&sandbox);
                self.adopt(&sandbox, record, live, || {});
                Ok(())
            }
            Ok(None) => self.recover_failed(record, "its machine ended while the node was down".into()).await,
            Err(error) => self.recover_failed(record, format!("it could not be found again: {error}")).await,
        }
    }

    async fn find(&self, record: &SandboxRecord) -> Result<Option<Live>> {
        let slot = match record.slot {
            Some(index) => Some(self.fleet.network.adopt(index).await?),
            None => None,
        };
        let adopted = self.fleet.engine.adopt(&self.fleet.paths(record.id, slot.as_ref())).await;
        let machine = match adopted {
            Ok(Some(machine)) => machine,
            other => {
                if let Some(slot) = slot {
                    self.fleet.network.give_back(slot).await;
                }
                other.map_err(|cause| Error::internal("its monitor cannot be reached", cause))?;
                return Ok(None);
            }
        };
        match self.take_up(record, machine.as_ref()).await {
            Ok(guest) => {
                let ticket = self.fleet.admission.count(record.shape);
                Ok(Some(Live { id: record.id, machine, guest, slot: Mutex::new(slot), _ticket: ticket }))
            }
            Err(error) => {
                self.fleet.end_machine(record.id, machine.as_ref(), slot).await;
                Err(error)
            }
        }
    }

    /// The earlier node may have died in the middle of a freeze: the machine continues as recorded.
    async fn take_up(&self, record: &SandboxRecord, machine: &dyn Machine) -> Result<GuestLink> {
        let broken = |cause| Error::internal("cannot resume its machine", cause);
        // Parked vCPUs answer nothing: those of a paused sandbox, too, run for the handshake.
        machine.resume().await.map_err(broken)?;
        let guest = GuestLink::connect(&machine.agent_socket(), record.generation).await?;
        if record.status == Status::Running {
            put_back_left(record.id, &guest, &self.store.run(record.id)).await;
            guest.thaw_user().await?;
        } else {
            guest.freeze_user().await?;
            machine.pause().await.map_err(broken)?;
        }
        Ok(guest)
    }

    async fn recover_failed(self: &Arc<Self>, record: SandboxRecord, why: String) -> Result<()> {
        tracing::warn!(id = %record.id, why, "a sandbox was lost");
        self.end_leftovers(record.id).await?;
        self.journal.emit(record.id, EventKind::Failed, |event| event.reason = Some(why.clone()));
        let failed = SandboxRecord { status: Status::Failed, slot: None, error: Some(why), ..record };
        self.journal.records.put(vec![failed.clone()]).await?;
        self.sandboxes.insert(&Sandbox::new(failed, None));
        Ok(())
    }

    /// Ends whatever runs with a sandbox's resources and removes them.
    async fn end_leftovers(&self, id: SandboxId) -> Result<()> {
        let paths = self.fleet.paths(id, None);
        let stuck = |cause| Error::internal("cannot end a leftover monitor", cause);
        if let Some(machine) = self.fleet.engine.adopt(&paths).await.map_err(stuck)? {
            machine.stop().await.map_err(stuck)?;
        }
        self.store.remove(paths.dir).await?;
        self.store.remove(paths.run_dir).await
    }

    /// Machines and directories that no record names: VMs that were prepared ahead, creates and
    /// forks that were interrupted.
    pub(crate) async fn clear_unnamed(&self, named: &HashSet<SandboxId>) -> Result<()> {
        for name in self.store.names("sandboxes")? {
            match name.parse() {
                Ok(id) if named.contains(&id) => {}
                Ok(id) => self.end_leftovers(id).await?,
                Err(_) => self.store.remove(self.store.root().join("sandboxes").join(name)).await?,
            }
        }
        let run: HashSet<PathBuf> = named.iter().map(|&id| self.store.run(id)).collect();
        for name in self.store.run_names()? {
            let dir = self.store.run_root().join(name);
            // Only what looks like ours: 32 hexadecimal digits.
            let ours = dir.file_name().is_some_and(|name| name.len() == 32) && dir.is_dir();
            if ours && !run.contains(&dir) {
                self.store.remove(dir).await?;
            }
        }
        let woken: HashSet<PathBuf> = self
            .sandboxes
            .all()
            .iter()
            .map(|sandbox| sandbox.record())
            .filter(|record| record.status == Status::Hibernated)
            .map(|record| self.store.hibernated(record.id, record.generation))
            .collect();
        self.keep_only("hibernated", &woken).await
    }

    async fn keep_only(&self, part: &str, keep: &HashSet<PathBuf>) -> Result<()> {
        for name in self.store.names(part)? {
            let dir = self.store.root().join(part).join(name);
            if !keep.contains(&dir) {
                tracing::info!(dir = %dir.display(), "removing an incomplete directory");
                self.store.remove(dir).await?;
            }
        }
        Ok(())
    }

    pub(crate) async fn clear_scratch(&self) -> Result<()> {
        let cache = self.config.cache_dir.clone().unwrap_or_else(|| self.store.in_data("cache"));
        let tidied = tokio::task::spawn_blocking(move || {
            keiki_image::Builder::new(cache, Arc::new(|_: &str| {})).tidy()
        });
        if let Ok(Err(error)) = tidied.await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot remove an unfinished build from the cache"
            );
        }
        self.keep_only("scratch", &HashSet::new()).await
    }

    async fn recover_snapshots(&self) -> Result<()> {
        let records: Vec<SnapshotRecord> = self.journal.records.all().await?;
        let keep: HashSet<PathBuf> = records.iter().map(|record| self.store.snapshot(record.id)).collect();
        self.keep_only("snapshots", &keep).await?;
        let lost: Vec<String> = records
            .iter()
            .filter(|record| !self.store.snapshot(record.id).is_dir())
            .map(|record| record.id.to_string())
            .collect();
        self.journal.records.remove::<SnapshotRecord>(lost).await
    }

    async fn recover_templates(self: &Arc<Self>) -> Result<()> {
        let records: Vec<TemplateRecord> = self.journal.records.all().await?;
        let current: HashMap<&str, &str> =
            records.iter().map(|record| (record.name.as_str(), record.version.as_str())).collect();
        for name in self.store.names("templates")? {
            let keep = current.get(name.as_str()).map(|version| self.store.template(&name, version));
            self.keep_only(&format!("templates/{name}"), &keep.into_iter().collect()).await?;
        }
        for record in records {
            self.open_template(record).await?;
        }
        Ok(())
    }
}
