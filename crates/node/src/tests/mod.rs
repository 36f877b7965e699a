//! The verbs over an engine without guests, in milliseconds: what must hold, whatever fails.

mod agent;
mod verbs;

use crate::{
    Config, Node,
    network::Network,
    records::{Records, TemplateRecord},
    store::Store,
};
use agent::Agents;
use anyhow::Result;
use keiki_engine::{BootSpec, Engine, VmPaths, fake::FakeEngine};
use keiki_types::{EngineKind, Shape, Sharing};
use parking_lot::Mutex;
use std::{collections::BTreeSet, fs, path::Path, sync::Arc};
use tempfile::TempDir;

const SHAPE: Shape = Shape { vcpus: 1, memory_mib: 128, disk_mib: 1024 };
/// A version of an earlier node, whose digest was made in another way.
const VERSION: &str = "0123abcd-0123456789ab";

/// What outlives a node.
struct Host {
    dir: TempDir,
    engine: FakeEngine,
    agents: Arc<Agents>,
    used: Arc<Mutex<BTreeSet<u16>>>,
}

impl Host {
    /// With a baked template.
    async fn new() -> Result<Self> {
        let (dir, agents) = (tempfile::tempdir()?, Arc::<Agents>::default());
        let engine = FakeEngine::new(agent::agent(&agents));
        let host = Self { dir, engine, agents, used: Arc::default() };
        let store = host.store()?;
        let (template, boot) = (store.template("base", VERSION), host.dir.path().join("boot"));
        let paths = VmPaths { run_dir: boot.join("run"), dir: boot, netns: None };
        fs::create_dir_all(&template)?;
        fs::create_dir_all(&paths.run_dir)?;
        let (kernel, initrd, disk) = Default::default();
        let spec = BootSpec { shape: SHAPE, kernel, initrd, disk, cmdline: String::new() };
        let machine = host.engine.boot(&spec, paths).await?;
        let image = host.engine.image(&template, SHAPE).await?;
        machine.freeze(image).await?.0.persist().await?;
        machine.stop().await?;
        let record = TemplateRecord {
            name: "base".into(),
            version: VERSION.into(),
            shape: SHAPE,
            created_at: time::OffsetDateTime::UNIX_EPOCH,
            size_bytes: 1,
            description: String::new(),
            generation: 1,
            engine: EngineKind::Kvm,
            cold_boot_ms: 1.0,
            kernel: String::new(),
        };
        Records::open(&store.in_data("keiki.db"))?.put(vec![record]).await?;
        Ok(host)
    }

    fn store(&self) -> Result<Store> {
        Store::in_dirs(&self.dir.path().join("data"), &self.dir.path().join("run"))
    }

    async fn start(&self) -> Result<Node> {
        let store = self.store()?;
        let records = Records::open(&store.in_data("keiki.db"))?;
        let network = Network::None(Arc::clone(&self.used));
        let engine = Arc::new(self.engine.clone());
        Ok(Node::start_with(config(self.dir.path()), store, records, engine, "fake".into(), network).await?)
    }

    fn entries(&self, part: &str) -> Result<usize> {
        Ok(fs::read_dir(self.dir.path().join("data/store").join(part))?.count())
    }
}

fn config(dir: &Path) -> Config {
    Config {
        data_dir: dir.join("data"),
        run_dir: dir.join("run"),
        cache_dir: None,
        templates_dir: None,
        listen: "127.0.0.1:0".into(),
        api_keys: Vec::new(),
        engine: None,
        vmm_binary: None,
        sharing: Sharing::Node,
        slot_range: "10.200.0.0/16".into(),
        guest_binary: dir.join("keiki-guest"),
        store_gib: None,
        memory_limit_mib: Some(64 << 10),
        seats_ahead: 0,
        egress_allow: Vec::new(),
        preview_suffix: "localhost".into(),
        dns: Vec::new(),
        snapshot_max_age: None,
        snapshot_refuse_age: None,
        ephemeral: false,
    }
}
