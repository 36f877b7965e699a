//! Queries of the node: metrics and events.

use crate::{
    daemon::Node,
    error::{Error, Result},
    events::MOST,
    metrics::{Gauges, Process},
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

    fn previews(&self) -> Previews {
        self.inner.previews.clone()
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
        let now = Gauges {
            build: (env!("CARGO_PKG_VERSION").into(), inner.engine_version.clone()),
            sandboxes: Status::ALL
                .map(|state| (state, states.iter().filter(|now| **now == state).count()))
                .into(),
            prestarted: inner.templates.prestarted(),
            memory_limit: inner.fleet.admission.limit_bytes(),
            memory_admitted: inner.fleet.admission.used_bytes(),
            memory_guest: memory.guest_bytes,
            memory_resident: memory.rss_bytes,
            memory_pss: memory.pss_bytes,
            memory_private: memory.private_bytes,
            memory_shared: memory.shared_bytes,
            slots_used,
            slots_ready,
            store_size,
            store_free,
            store_reserved: inner.fleet.room.reserved(),
            snapshots: inner.journal.records.count::<SnapshotRecord>().await?,
            process: process(),
        };
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
fn process() -> Process {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    Process {
        memory: field("VmRSS:").unwrap_or(0) << 10,
        heap: keiki_sys::heap::heap(),
        cpu: keiki_sys::process::cpu_time(std::process::id())
            .ok()
            .flatten()
            .unwrap_or_default()
            .as_secs_f64(),
        fds: fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0),
        threads: field("Threads:").unwrap_or(0),
    }
}
