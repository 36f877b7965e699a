//! What the node records: records that survive a crash, events that clients can follow, and metrics.

use crate::{
    events::{Events, event},
    metrics::Metrics,
    records::Records,
};
use keiki_types::{
    SandboxId,
    api::{Event, EventKind, Timings},
};
use std::sync::Arc;

pub struct Journal {
    pub records: Records,
    pub events: Arc<Events>,
    pub metrics: Metrics,
}

impl Journal {
    /// Something happened to a sandbox.
    pub fn emit(&self, id: SandboxId, kind: EventKind, more: impl FnOnce(&mut Event)) {
        let mut event = event(id, kind);
        more(&mut event);
        self.metrics.event(kind.as_str());
        self.events.emit(event);
    }

    /// A verb has finished: one log line with its steps, and its metrics.
    pub fn done(&self, verb: &str, id: &str, timings: &Timings) {
        let steps: Vec<String> =
            timings.steps.iter().map(|step| format!("{}={:.1}", step.name, step.ms)).collect();
        tracing::info!(operation = verb, id, ms = timings.total_ms, steps = steps.join(" "), "done");
        self.metrics.verb(verb, timings);
    }
}
