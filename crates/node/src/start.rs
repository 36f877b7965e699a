//! Start and stop.

use crate::{
    admission::Admission,
    config::Config,
    daemon::{Inner, Node},
    error::{Error, Result},
    events::Events,
    fleet::Fleet,
    journal::Journal,
    key,
    locks::Locks,
    memory::Measured,
    metrics::Metrics,
    network::Network,
    records::{Records, SandboxRecord},
    sandboxes::Sandboxes,
    store::{Store, make_dir},
    sweep,
    templates::Templates,
};
use keiki_api::Previews;
use keiki_engine::{Capabilities, Common, Engine, kvm, qemu};
use keiki_net::{EgressPolicy, NodeTag, Slots, SlotsConfig};
use keiki_types::EngineKind;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio_util::task::TaskTracker;

/// How long a stopping node waits for running operations.
const VERB_LIMIT: Duration = Duration::from_secs(45);
/// Network slots built ahead of use.
const SLOTS_AHEAD: usize = 8;

impl Node {
    /// Starts a node on its directories.
    ///
    /// # Errors
    /// If something it needs is missing; the error names it.
    pub async fn start(config: Config) -> Result<Self> {
        if !config.guest_binary.is_file() {
            return Err(Error::Invalid(format!(
                "no guest agent at {}: build it, or set --guest-binary",
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
        let records = Records::open(&store.in_data("keiki.db"))?;
        let (engine, capabilities) = choose_engine(&config, &store).await?;
        tracing::info!(engine = %capabilities.kind, note = capabilities.note, "engine ready");
        let known: Vec<SandboxRecord> = records.all().await?;
        let network = Network::Slots(open_slots(&config, &known).await?);
        let version = format!("{} {}", capabilities.kind, capabilities.version);
        Self::start_with(config, store, records, engine, version, network).await
    }

    /// Recovers what an earlier node left, with this engine.
    pub(crate) async fn start_with(
        config: Config,
        store: Store,
        records: Records,
        engine: Arc<dyn Engine>,
        engine_version: String,
        network: Network,
    ) -> Result<Self> {
        let events = Events::open(&store.in_data("events.db"))?;
        let trusts_all = config.api_keys.is_empty() && is_loopback(&config.listen).await;
        let preview_key = key::secret(&store.in_data("preview.key"), "previews")?;
        let previews = Previews::new(preview_key, &config.preview_suffix, trusts_all)?;
        let request_key = key::secret(&store.in_data("requests.key"), "idempotent requests")?;
        let admission = config.memory_limit_mib.map_or_else(Admission::of_host, Admission::new);
        let known: Vec<SandboxRecord> = records.all().await?;
        let inner = Arc::new(Inner {
            engine_version,
            trusts_all,
            fleet: Fleet::new(engine, network, store.clone(), config.sharing, admission),
            config,
            journal: Journal { records, events, metrics: Metrics::default() },
            store,
            measured: Measured::default(),
            previews,
            request_key,
            templates: Templates::default(),
            sources: Locks::default(),
            requests: Locks::default(),
            under_way: TaskTracker::new(),
            sandboxes: Sandboxes::default(),
        });
        inner.recover(known).await?;
        inner.fleet.engine.adoption_finished();
        tokio::spawn(sweep::sweeper(Arc::downgrade(&inner)));
        tokio::spawn(Arc::clone(&inner.journal.events).keep_writing());
        Ok(Self { inner })
    }

    /// Stops: no new verb starts, and running ones finish. Machines keep running for the
    /// next node to find, unless this one is ephemeral.
    pub async fn stop(&self) {
        let inner = &self.inner;
        inner.under_way.close();
        inner.close_templates().await;
        if tokio::time::timeout(VERB_LIMIT, inner.under_way.wait()).await.is_err() {
            tracing::error!("some operations did not finish; the next start cleans up after them");
        }
        inner.fleet.engine.close().await;
        for sandbox in inner.sandboxes.all().into_iter().filter(|_| inner.config.ephemeral) {
            if let Err(error) = inner.delete(sandbox.id).await {
                tracing::error!(id = %sandbox.id, error = &error as &dyn std::error::Error, "cannot delete a sandbox");
            }
        }
        // An abandoned build.
        let named = inner.sandboxes.all().iter().map(|sandbox| sandbox.id).collect();
        if let Err(error) = inner.clear_unnamed(&named).await.and(inner.clear_scratch().await) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "cannot remove everything that was left behind"
            );
        }
        inner.journal.events.flush().await;
        if !inner.config.ephemeral {
            return;
        }
        inner.fleet.network.stop().await;
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
        .map_err(|cause| Error::internal("cannot inspect the data directory", cause))?;
    let tag = format!("{:06x}", (meta.ino() ^ (meta.dev() << 12)) & 0xff_ffff);
    tag.parse()
        .map_err(|error| Error::internal("cannot derive a tag for this node", anyhow::anyhow!("{error}")))
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
