//! Queries of the node: metrics and events.

use crate::{
    daemon::Node,
    error::{Error, Result},
    events::MOST,
    metrics::Gauges,
    records::SnapshotRecord,
};
use async_trait::async_trait;
use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use keiki_api::{Host, Previews, Secret};
use keiki_types::{
    SandboxId, Status,
    api::{Event, Version},
};
use std::fs;
use subtle::ConstantTimeEq;

#[async_trait]
impl Host for Node {
    fn version(&self) -> Version {
        Version { version: env!("CARGO_PKG_VERSION").into(), engine: self.inner.engine_version.clone() }
    }

    fn authorize(&self, key: Option<&str>) -> Result<()> {
        let sent = key.unwrap_or_default().as_bytes();
        // In constant time: a near miss takes as long as a far one.
        let is_known = self.inner.config.api_keys.iter().any(|known| known.as_bytes().ct_eq(sent).into());
        if self.inner.trusts_all || is_known { Ok(()) } else { Err(Error::Unauthorized) }
    }

    fn previews(&self) -> &Previews {
        &self.inner.previews
    }

    fn request_key(&self) -> Secret {
        self.inner.request_key
    }

    async fn metrics(&self) -> Result<String> {
        let inner = &self.inner;
        let sandboxes = inner.sandboxes.all();
        let states: Vec<Status> = sandboxes.iter().map(|sandbox| sandbox.record().status).collect();
        let machines = sandboxes.iter().filter_map(|sandbox| sandbox.live()).collect();
        let memory = inner.measured.of(machines).await;
        let (store_size, store_free) = inner.store.space()?;
        let (slots_used, slots_ready) = inner.fleet.network.used_and_ready();
        let snapshots = inner.journal.records.count::<SnapshotRecord>().await?;
        let Version { version, engine } = self.version();
        let mut now = Gauges::default();
        let of_state = |state: Status| states.iter().filter(|now| **now == state).count() as u64;
        let by_state = Status::ALL.map(|state| ([("state", state.as_str().into())], of_state(state)));
        now.numbers("keiki_sandboxes", "Sandboxes by state", by_state);
        let by_template = inner.templates.prestarted().into_iter();
        let by_template = by_template.map(|(name, count)| ([("template", name)], count as u64));
        now.numbers("keiki_prestarted_machines", "VMs prepared ahead of creates", by_template);
        let build = [([("version", version), ("engine", engine)], 1)];
        now.numbers("keiki_build_info", "Version and engine of the node; always 1", build);
        let admission = &inner.fleet.admission;
        for (name, help, value) in [
            ("memory_limit", "RAM available to all machines together", admission.limit_bytes()),
            ("memory_admitted", "RAM reserved for machines, each at its worst case", admission.used_bytes()),
            ("memory_guest", "RAM that guests believe they have", memory.guest_bytes),
            ("memory_resident", "Resident sets of all monitors", memory.rss_bytes),
            ("memory_pss", "Proportional set sizes of all monitors", memory.pss_bytes),
            ("memory_private", "Guest pages that only one machine has", memory.private_bytes),
            ("memory_shared", "Guest pages that are shared", memory.shared_bytes),
            ("store_size", "Size of the store's file system", store_size),
            ("store_free", "Store bytes free for new data", store_free),
            ("store_reserved", "Store bytes reserved for running operations", inner.fleet.room.reserved()),
        ] {
            now.bytes(&format!("keiki_{name}"), help, value);
        }
        now.number("keiki_slots_used", "Network slots of machines and prepared VMs", slots_used as u64);
        now.number("keiki_slots_ready", "Network slots built ahead", slots_ready as u64);
        now.number("keiki_snapshots", "Snapshots", snapshots as u64);
        of_daemon(&mut now);
        Ok(inner.journal.metrics.text(&now))
    }

    async fn events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
        limit: Option<usize>,
    ) -> Result<Vec<Event>> {
        self.known(of).await?;
        self.inner.journal.events.list(of, since, limit.unwrap_or(MOST).min(MOST)).await
    }

    async fn follow_events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
    ) -> Result<BoxStream<'static, Event>> {
        self.known(of).await?;
        Ok(ending_with_its_sandbox(of, self.inner.journal.events.follow(of, since)).boxed())
    }
}

impl Node {
    async fn known(&self, of: Option<SandboxId>) -> Result<()> {
        let Some(id) = of else { return Ok(()) };
        if self.inner.sandboxes.get(id).is_ok()
            || !self.inner.journal.events.list(of, None, 1).await?.is_empty()
        {
            return Ok(());
        }
        Err(Error::NotFound(format!("no sandbox {id}")))
    }
}

/// The events of one sandbox end with its deletion.
fn ending_with_its_sandbox(
    of: Option<SandboxId>,
    events: impl Stream<Item = Event> + Send,
) -> impl Stream<Item = Event> + Send {
    use keiki_types::api::EventKind::Deleted;
    stream::unfold(Some(Box::pin(events)), move |events| async move {
        let mut events = events?;
        let event = events.next().await?;
        let is_last = of.is_some() && event.kind == Deleted;
        Some((event, (!is_last).then_some(events)))
    })
}

/// The daemon itself. What cannot be read is 0.
fn of_daemon(now: &mut Gauges) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let heap = keiki_sys::heap::heap();
    now.bytes("keiki_heap_used", "Heap of the node in use", heap.used);
    now.bytes("keiki_heap_kept", "Heap of the node freed and kept for reuse", heap.kept);
    // Names that every Prometheus client gives to its own process.
    let resident = field("VmRSS:").unwrap_or(0) << 10;
    now.number("process_resident_memory_bytes", "Resident memory of the node", resident);
    let cpu = keiki_sys::process::cpu_time(std::process::id()).ok().flatten().unwrap_or_default();
    let cpu = cpu.as_secs_f64();
    now.counted_seconds("process_cpu_seconds", "CPU time of the node since it started", cpu);
    let fds = fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
    now.number("process_open_fds", "Open descriptors of the node", fds as u64);
    now.number("process_threads", "Threads of the node", field("Threads:").unwrap_or(0));
}
