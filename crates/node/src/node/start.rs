//! Start and stop. A node that starts finds what an earlier one left: machines that still run go on, and
//! everything half-made is removed. The records decide: what they do not name does not exist.

use super::{
    Config, Inner, Node, fleet::Fleet, observe::Measured, secrets::Out, sources::Sources, sweep,
    template::Templates,
};
use crate::{
    admission::Admission,
    error::{Error, Result},
    events::Events,
    guest::GuestLink,
    key,
    locks::Locks,
    metrics::Metrics,
    records::{Records, SandboxRecord, SnapshotRecord, TemplateRecord},
    sandbox::{Live, Sandbox},
    store::{Store, make_dir},
};
use keiki_api::Previews;
use keiki_engine::{Capabilities, Common, Engine, Machine, kvm, qemu};
use keiki_net::{EgressPolicy, NodeTag, Slots, SlotsConfig};
use keiki_sys::failpoint;
use keiki_types::{EngineKind, SandboxId, Status, api::EventKind};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::{Arc, RwLock},
    time::Duration,
};
use tokio_util::task::TaskTracker;

/// How long a node that stops waits for what is under way.
const VERB_LIMIT: Duration = Duration::from_secs(45);
/// Network slots built ahead of use.
const SLOTS_AHEAD: usize = 8;

impl Node {
    /// Starts a node on its directories.
    ///
    /// # Errors
    /// If something it needs is missing; the sentence says what.
    pub async fn start(config: Config) -> Result<Self> {
        if !config.guest_binary.is_file() {
            return Err(Error::Invalid(format!(
                "no guest agent at {}: build it, or say where it is with --guest-binary",
                config.guest_binary.display()
            )));
        }
        let store = Store::open(&config.data_dir, &config.run_dir, config.store_gib).await?;
        match Self::start_on(config, store.clone()).await {
            Ok(node) => Ok(node),
            Err(error) => {
                store.abandon().await;
                Err(error)
            }
        }
    }

    async fn start_on(config: Config, store: Store) -> Result<Self> {
        let records = Records::open(&store.database())?;
        let events = Events::open(&store.events())?;
        let trusts_all = config.api_keys.is_empty() && is_loopback(&config.listen).await;
        let preview_key = key::secret(&store.preview_key())
            .map_err(|cause| Error::internal("cannot read or make the secret of previews", cause))?;
        let previews = Previews::new(preview_key, &config.preview_suffix, trusts_all)?;
        let request_key = key::secret(&store.request_key())
            .map_err(|cause| Error::internal("cannot read or make the key of named requests", cause))?;
        let (engine, capabilities) = choose_engine(&config, &store).await?;
        tracing::info!(engine = %capabilities.kind, note = capabilities.note, "engine ready");
        let known: Vec<SandboxRecord> = records.all().await?;
        let slots = open_slots(&config, &known).await?;
        let admission = config.memory_limit_mib.map_or_else(Admission::of_host, Admission::new);
        let fleet = Fleet::new(engine, slots, store.clone(), config.sharing, admission);
        let inner = Arc::new(Inner {
            engine_version: format!("{} {}", capabilities.kind, capabilities.version),
            trusts_all,
            config,
            records,
            store,
            fleet,
            metrics: Metrics::default(),
            measured: Measured::default(),
            events,
            previews,
            request_key,
            templates: Templates::default(),
            sources: Sources::default(),
            requests: Locks::default(),
            under_way: TaskTracker::new(),
            sandboxes: RwLock::new(HashMap::new()),
        });
        inner.recover(known).await?;
        inner.fleet.engine.adoption_finished();
        tokio::spawn(sweep::sweeper(Arc::downgrade(&inner)));
        tokio::spawn(inner.events.clone().keep_writing());
        Ok(Self { inner })
    }

    /// Stops: no verb begins any more, and those under way come to their end. Machines go on running for the
    /// next node to find, unless this one is ephemeral.
    pub async fn stop(&self) {
        let inner = &self.inner;
        inner.under_way.close();
        inner.close_templates().await;
        if tokio::time::timeout(VERB_LIMIT, inner.under_way.wait()).await.is_err() {
            tracing::error!("some operations did not come to an end; the next start removes what they leave");
        }
        inner.fleet.engine.close().await;
        for sandbox in inner.sandboxes().into_iter().filter(|_| inner.config.ephemeral) {
            if let Err(error) = inner.delete(sandbox.id).await {
                tracing::error!(id = %sandbox.id, error = &error as &dyn std::error::Error, "could not be ended");
            }
        }
        // A build that was given up.
        let named = inner.sandboxes().iter().map(|sandbox| sandbox.id).collect();
        if let Err(error) = inner.clear_unnamed(&named).await.and(inner.clear_scratch().await) {
            tracing::error!(error = &error as &dyn std::error::Error, "something is left behind");
        }
        inner.events.flush().await;
        if !inner.config.ephemeral {
            return;
        }
        inner.fleet.slots.stop(&[]).await;
        if let Err(error) = inner.store.unmount().await {
            tracing::error!(error = &error as &dyn std::error::Error, "the store stays mounted");
        }
    }
}

/// The engine that was asked for, or the best that works here.
async fn choose_engine(config: &Config, store: &Store) -> Result<(Arc<dyn Engine>, Capabilities)> {
    let mut refused = String::new();
    if config.engine != Some(EngineKind::Qemu) {
        match kvm_engine(config, store).await? {
            (engine, capabilities) if capabilities.usable => return Ok((engine, capabilities)),
            (_, capabilities) => refused = capabilities.note,
        }
    }
    if config.engine == Some(EngineKind::Kvm) {
        return Err(Error::Invalid(format!("engine kvm cannot run here: {refused}")));
    }
    let engine = qemu::Qemu::new(qemu::QemuConfig::new(store.engine()?));
    let mut capabilities = engine.probe().await;
    if !capabilities.usable {
        return Err(Error::Invalid(format!("engine qemu cannot run here: {}", capabilities.note)));
    }
    if !refused.is_empty() {
        capabilities.note = format!("{}; not kvm: {refused}", capabilities.note);
    }
    Ok((Arc::new(engine), capabilities))
}

async fn kvm_engine(config: &Config, store: &Store) -> Result<(Arc<dyn Engine>, Capabilities)> {
    let forced = config.engine == Some(EngineKind::Kvm);
    let binary = config.vmm_binary.clone().unwrap_or_else(|| PathBuf::from("keiki-vmm"));
    let engine = kvm::Kvm::new(kvm::KvmConfig { binary, forced, common: Common::new(store.engine()?) });
    let capabilities = engine.probe().await;
    Ok((Arc::new(engine), capabilities))
}

async fn open_slots(config: &Config, known: &[SandboxRecord]) -> Result<Slots> {
    let range = config.slot_range.parse().map_err(|error| Error::Invalid(format!("slot range: {error}")))?;
    let mut egress = EgressPolicy::default();
    for network in &config.egress_allow {
        egress.allow.push(network.parse().map_err(|error| Error::Invalid(format!("egress allow: {error}")))?);
    }
    let in_use: Vec<u16> = known.iter().filter_map(|record| record.slot).collect();
    let slots = SlotsConfig {
        range,
        ahead: SLOTS_AHEAD,
        state_dir: config.data_dir.join("net"),
        node_tag: node_tag(&config.data_dir)?,
        upstream: (!config.dns.is_empty()).then(|| config.dns.clone()),
        egress,
    };
    make_dir(&slots.state_dir)?;
    Slots::start(slots, &in_use).await.map_err(|cause| Error::internal("the network cannot be set up", cause))
}

/// Only this host can reach an API that listens there.
async fn is_loopback(listen: &str) -> bool {
    let Ok(addresses) = tokio::net::lookup_host(listen).await else { return false };
    let mut addresses = addresses.peekable();
    addresses.peek().is_some() && addresses.all(|address| address.ip().is_loopback())
}

/// Distinct per data directory, and the same after a restart.
fn node_tag(data: &std::path::Path) -> Result<NodeTag> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(data)
        .map_err(|cause| Error::internal("cannot look at the data directory", cause))?;
    let tag = format!("{:06x}", (meta.ino() ^ (meta.dev() << 12)) & 0xff_ffff);
    tag.parse().map_err(|error| Error::internal("no tag for this node", anyhow::anyhow!("{error}")))
}

/// The earlier node may also have had secrets of it in its hands. A machine that does not take them goes on without.
async fn put_back_left(id: SandboxId, guest: &GuestLink, run: &Path) {
    let put = match Out::left(run) {
        Ok(Some(out)) => out.put_back(guest).await,
        Ok(None) => return,
        Err(error) => Err(error),
    };
    match put {
        Ok(()) => tracing::info!(%id, "secrets are back that an earlier node took out"),
        Err(error) => tracing::error!(%id, error = &error as &dyn std::error::Error, "secrets are lost"),
    }
}

impl Inner {
    async fn recover(self: &Arc<Self>, known: Vec<SandboxRecord>) -> Result<()> {
        let _armed = failpoint::arm("start");
        self.clear_scratch().await?;
        let mut named = HashSet::new();
        for record in known {
            match record.status {
                Status::Running | Status::Paused => self.recover_live(record.clone()).await?,
                Status::Hibernated | Status::Failed => self.recover_at_rest(record.clone()).await?,
                Status::Creating | Status::Stopping | Status::Deleted => {
                    tracing::info!(id = %record.id, status = %record.status, "removing what was half-made");
                    self.end_leftovers(record.id).await?;
                    self.records.remove::<SandboxRecord>(vec![record.id.to_string()]).await?;
                    continue;
                }
            }
            named.insert(record.id);
        }
        self.clear_unnamed(&named).await?;
        self.recover_snapshots().await?;
        self.recover_templates().await
    }

    /// A machine that should be running: find it, or say that it failed.
    async fn recover_live(self: &Arc<Self>, record: SandboxRecord) -> Result<()> {
        let found = self.find(&record).await;
        match found {
            Ok(Some(live)) => {
                tracing::info!(id = %record.id, "found running");
                failpoint::reach("adopt");
                if record.status == Status::Running {
                    self.tell(record.id, EventKind::Running, |_| {});
                }
                let sandbox = Sandbox::new(record.clone(), None);
                self.list_it(Arc::clone(&sandbox));
                self.adopt(&sandbox, record, live);
                Ok(())
            }
            Ok(None) => self.recover_failed(record, "its machine ended while the node was away".into()).await,
            Err(error) => self.recover_failed(record, format!("it could not be found again: {error}")).await,
        }
    }

    async fn find(&self, record: &SandboxRecord) -> Result<Option<Live>> {
        let slot = match record.slot {
            Some(index) => Some(
                self.fleet
                    .slots
                    .adopt(index)
                    .await
                    .map_err(|cause| Error::internal("its network slot is gone", cause))?,
            ),
            None => None,
        };
        let adopted = self.fleet.engine.adopt(&self.fleet.paths(record.id, slot.as_ref())).await;
        let machine = match adopted {
            Ok(Some(machine)) => machine,
            other => {
                if let Some(slot) = slot {
                    self.fleet.slots.give_back(slot).await;
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

    /// The earlier node may have ended in the middle of a freeze: the machine goes on as it was recorded.
    async fn take_up(&self, record: &SandboxRecord, machine: &dyn Machine) -> Result<GuestLink> {
        let broken = |cause| Error::internal("its machine does not go on", cause);
        if record.status == Status::Running {
            machine.resume().await.map_err(broken)?;
            let guest = GuestLink::connect(&machine.agent_socket(), record.generation).await?;
            put_back_left(record.id, &guest, &self.store.run(record.id)).await;
            guest.thaw_user().await?;
            return Ok(guest);
        }
        // Parked vCPUs answer nothing: let them run for the handshake. User processes stay frozen.
        machine.resume().await.map_err(broken)?;
        let guest = GuestLink::connect(&machine.agent_socket(), record.generation).await?;
        guest.freeze_user().await?;
        machine.pause().await.map_err(broken)?;
        Ok(guest)
    }

    async fn recover_failed(self: &Arc<Self>, record: SandboxRecord, why: String) -> Result<()> {
        tracing::warn!(id = %record.id, why, "a sandbox was lost");
        self.end_leftovers(record.id).await?;
        self.tell(record.id, EventKind::Failed, |event| event.reason = Some(why.clone()));
        let failed = SandboxRecord { status: Status::Failed, slot: None, error: Some(why), ..record };
        self.records.put(vec![failed.clone()]).await?;
        self.list_it(Sandbox::new(failed, None));
        Ok(())
    }

    /// A sandbox without a machine; one may be left of a hibernation or wake that was cut short.
    async fn recover_at_rest(&self, record: SandboxRecord) -> Result<()> {
        self.end_leftovers(record.id).await?;
        self.list_it(Sandbox::new(record, None));
        Ok(())
    }

    /// Ends whatever runs with a sandbox's resources and removes them.
    async fn end_leftovers(&self, id: SandboxId) -> Result<()> {
        let paths = self.fleet.paths(id, None);
        let stuck = |cause| Error::internal("a left-over monitor cannot be ended", cause);
        if let Some(machine) = self.fleet.engine.adopt(&paths).await.map_err(stuck)? {
            machine.stop().await.map_err(stuck)?;
        }
        self.store.remove(paths.dir).await?;
        self.store.remove(paths.run_dir).await
    }

    /// Machines and directories that no record names: places that waited, creates and forks cut short.
    async fn clear_unnamed(&self, named: &HashSet<SandboxId>) -> Result<()> {
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
            .sandboxes()
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
                tracing::info!(dir = %dir.display(), "removing what was half-made");
                self.store.remove(dir).await?;
            }
        }
        Ok(())
    }

    async fn clear_scratch(&self) -> Result<()> {
        let cache = self.config.cache_dir.clone().unwrap_or_else(|| self.store.cache());
        let tidied = tokio::task::spawn_blocking(move || {
            keiki_image::Builder::new(cache, Arc::new(|_: &str| {})).tidy()
        });
        if let Ok(Err(error)) = tidied.await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "an unfinished build stays in the cache"
            );
        }
        self.keep_only("scratch", &HashSet::new()).await
    }

    async fn recover_snapshots(&self) -> Result<()> {
        let records: Vec<SnapshotRecord> = self.records.all().await?;
        let keep: HashSet<PathBuf> = records.iter().map(|record| self.store.snapshot(record.id)).collect();
        self.keep_only("snapshots", &keep).await?;
        let lost: Vec<String> = records
            .iter()
            .filter(|record| !self.store.snapshot(record.id).is_dir())
            .map(|record| record.id.to_string())
            .collect();
        self.records.remove::<SnapshotRecord>(lost).await
    }

    async fn recover_templates(self: &Arc<Self>) -> Result<()> {
        let records: Vec<TemplateRecord> = self.records.all().await?;
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

#[cfg(test)]
mod tests {
    use super::is_loopback;

    #[tokio::test]
    async fn only_loopback_is_loopback() {
        for here in ["127.0.0.1:7777", "[::1]:0", "localhost:80"] {
            assert!(is_loopback(here).await, "{here}");
        }
        for open in ["0.0.0.0:7777", "[::]:7777", "198.51.100.7:80", "nonsense", ""] {
            assert!(!is_loopback(open).await, "{open}");
        }
    }
}
