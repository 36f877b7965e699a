//! Metrics of the node, in the Prometheus text format.
//!
//! Two kinds. *Counters and histograms* grow while the node works: a verb that succeeds adds its
//! steps, each at the cost of one lookup in a small table. *Gauges* describe the current state and
//! are computed on scrape ([`Gauges`]). docs/METRICS.md lists all of them.
//!
//! Labels have few values, whatever callers and guests do: no ids, routes instead of paths, no step
//! names from a guest.

use keiki_api::HISTOGRAM_BOUNDS;
use keiki_sys::heap::Heap;
use keiki_types::{Status, api::Timings};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use std::sync::{Arc, atomic::AtomicU64};

/// Steps that guests time. Their names come from the guest: others are counted together.
const GUEST_STEPS: [&str; 11] = [
    "entropy",
    "clock",
    "hostname",
    "machine_id",
    "seeds",
    "host_keys",
    "connections",
    "secrets",
    "generation",
    "hooks",
    "thaw_user",
];
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfVerb {
    verb: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStep {
    verb: String,
    step: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfState {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTemplate {
    template: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfBuild {
    version: String,
    engine: String,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// Everything that is counted. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    inner: Arc<Inner>,
}

struct Inner {
    registry: Registry,
    verbs: Histograms<OfVerb>,
    steps: Histograms<OfStep>,
    vcpu_pauses: Histograms<OfVerb>,
    user_pauses: Histograms<OfVerb>,
    events: Family<OfKind, Counter>,
    sandboxes: Family<OfState, Gauge>,
    prestarted: Family<OfTemplate, Gauge>,
    figures: Figures,
    build: Family<OfBuild, Gauge>,
}

/// Gauges without labels.
#[derive(Default)]
struct Figures {
    memory_limit: Gauge,
    memory_admitted: Gauge,
    memory_guest: Gauge,
    memory_resident: Gauge,
    memory_pss: Gauge,
    memory_private: Gauge,
    memory_shared: Gauge,
    slots_used: Gauge,
    slots_ready: Gauge,
    store_size: Gauge,
    store_free: Gauge,
    store_reserved: Gauge,
    snapshots: Gauge,
    heap_used: Gauge,
    heap_kept: Gauge,
    process_memory: Gauge,
    process_cpu: Counter<f64, AtomicU64>,
    process_fds: Gauge,
    process_threads: Gauge,
}

/// The current state, at a scrape.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Gauges {
    /// Version of the node, and what runs its machines.
    pub build: (String, String),
    /// How many sandboxes in which state.
    pub sandboxes: Vec<(Status, usize)>,
    /// Monitors that wait, by template.
    pub prestarted: Vec<(String, usize)>,
    /// RAM available to all machines together.
    pub memory_limit: u64,
    /// RAM promised to them, each by its worst case.
    pub memory_admitted: u64,
    /// RAM that guests believe they have.
    pub memory_guest: u64,
    /// Resident sets of their monitors.
    pub memory_resident: u64,
    /// Their proportional sets: what they really cost.
    pub memory_pss: u64,
    /// Guest pages that one machine alone has.
    pub memory_private: u64,
    /// Guest pages that are shared.
    pub memory_shared: u64,
    /// Network slots of machines and of places.
    pub slots_used: usize,
    /// Network slots built ahead.
    pub slots_ready: usize,
    /// Of the store's file system.
    pub store_size: u64,
    /// Free for new data.
    pub store_free: u64,
    /// Promised to operations under way.
    pub store_reserved: u64,
    /// Snapshots that are recorded.
    pub snapshots: usize,
    /// Of the daemon itself.
    pub process: Process,
}

/// The daemon as the kernel sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Process {
    /// Resident bytes.
    pub memory: u64,
    /// Of these the heap, used and kept.
    pub heap: Heap,
    /// CPU seconds, user and system.
    pub cpu: f64,
    /// Open descriptors.
    pub fds: usize,
    /// Threads.
    pub threads: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { inner: Arc::new(Inner::new()) }
    }
}

impl Inner {
    fn new() -> Self {
        let histograms = (|| Histogram::new(HISTOGRAM_BOUNDS)) as fn() -> Histogram;
        let mut inner = Self {
            registry: Registry::default(),
            verbs: Family::new_with_constructor(histograms),
            steps: Family::new_with_constructor(histograms),
            vcpu_pauses: Family::new_with_constructor(histograms),
            user_pauses: Family::new_with_constructor(histograms),
            events: Family::default(),
            sandboxes: Family::default(),
            prestarted: Family::default(),
            figures: Figures::default(),
            build: Family::default(),
        };
        let mut registry = Registry::default();
        inner.register(&mut registry);
        inner.figures.register(&mut registry);
        inner.registry = registry;
        inner
    }

    fn register(&self, registry: &mut Registry) {
        let keiki = registry.sub_registry_with_prefix("keiki");
        let seconds = || Unit::Seconds;
        keiki.register_with_unit("verb", "Whole verb at the node", seconds(), self.verbs.clone());
        keiki.register_with_unit("verb_step", "One step of a verb", seconds(), self.steps.clone());
        keiki.register_with_unit("vcpu_pause", "vCPUs stood still", seconds(), self.vcpu_pauses.clone());
        keiki.register_with_unit(
            "user_pause",
            "User processes stood still",
            seconds(),
            self.user_pauses.clone(),
        );
        keiki.register("sandbox_events", "Events of sandboxes", self.events.clone());
        keiki.register("sandboxes", "Sandboxes by state", self.sandboxes.clone());
        keiki.register("prestarted_machines", "VMs prepared ahead of creates", self.prestarted.clone());
        keiki.register("build_info", "Version and engine of the node; always 1", self.build.clone());
    }
}

impl Figures {
    fn register(&self, registry: &mut Registry) {
        let keiki = registry.sub_registry_with_prefix("keiki");
        for (name, help, gauge) in [
            ("memory_limit", "RAM available to all machines together", &self.memory_limit),
            ("memory_admitted", "RAM reserved for machines, each at its worst case", &self.memory_admitted),
            ("memory_guest", "RAM that guests believe they have", &self.memory_guest),
            ("memory_resident", "Resident sets of all monitors", &self.memory_resident),
            ("memory_pss", "Proportional set sizes of all monitors", &self.memory_pss),
            ("memory_private", "Guest pages that only one machine has", &self.memory_private),
            ("memory_shared", "Guest pages that are shared", &self.memory_shared),
            ("store_size", "Size of the store's file system", &self.store_size),
            ("store_free", "Store bytes free for new data", &self.store_free),
            ("store_reserved", "Store bytes reserved for running operations", &self.store_reserved),
            ("heap_used", "Heap of the node in use", &self.heap_used),
            ("heap_kept", "Heap of the node freed and kept for reuse", &self.heap_kept),
        ] {
            keiki.register_with_unit(name, help, Unit::Bytes, gauge.clone());
        }
        keiki.register("slots_used", "Network slots of machines and prepared VMs", self.slots_used.clone());
        keiki.register("slots_ready", "Network slots built ahead", self.slots_ready.clone());
        keiki.register("snapshots", "Snapshots", self.snapshots.clone());
        // Names that every Prometheus client gives to its own process.
        let process = registry.sub_registry_with_prefix("process");
        process.register("resident_memory_bytes", "Resident memory of the node", self.process_memory.clone());
        process.register("cpu_seconds", "CPU time of the node since it started", self.process_cpu.clone());
        process.register("open_fds", "Open descriptors of the node", self.process_fds.clone());
        process.register("threads", "Threads of the node", self.process_threads.clone());
    }

    fn set(&self, now: &Gauges) {
        for (gauge, value) in [
            (&self.memory_limit, now.memory_limit),
            (&self.memory_admitted, now.memory_admitted),
            (&self.memory_guest, now.memory_guest),
            (&self.memory_resident, now.memory_resident),
            (&self.memory_pss, now.memory_pss),
            (&self.memory_private, now.memory_private),
            (&self.memory_shared, now.memory_shared),
            (&self.slots_used, now.slots_used as u64),
            (&self.slots_ready, now.slots_ready as u64),
            (&self.store_size, now.store_size),
            (&self.store_free, now.store_free),
            (&self.store_reserved, now.store_reserved),
            (&self.snapshots, now.snapshots as u64),
            (&self.heap_used, now.process.heap.used),
            (&self.heap_kept, now.process.heap.kept),
            (&self.process_memory, now.process.memory),
            (&self.process_fds, now.process.fds as u64),
            (&self.process_threads, now.process.threads),
        ] {
            gauge.set(signed(value));
        }
        self.process_cpu.inc_by((now.process.cpu - self.process_cpu.get()).max(0.0));
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A step's name as a label: of a guest's own steps only those that are known.
fn step_label(name: &str) -> String {
    match name.strip_prefix("guest:") {
        Some(step) if !GUEST_STEPS.contains(&step) => "guest:other".into(),
        _ => name.into(),
    }
}

impl Metrics {
    /// A verb that is done, with its steps.
    pub fn verb(&self, verb: &str, timings: &Timings) {
        let of = OfVerb { verb: verb.into() };
        self.inner.verbs.get_or_create(&of).observe(timings.total_ms / 1e3);
        for (family, ms) in [
            (&self.inner.vcpu_pauses, timings.vcpu_pause_ms),
            (&self.inner.user_pauses, timings.user_pause_ms),
        ] {
            if let Some(ms) = ms {
                family.get_or_create(&of).observe(ms / 1e3);
            }
        }
        self.steps(verb, &timings.steps);
    }

    /// Steps alone: of the copies that a verb made beside each other.
    pub fn steps(&self, verb: &str, steps: &[keiki_types::api::Step]) {
        for step in steps {
            let of = OfStep { verb: verb.into(), step: step_label(&step.name) };
            self.inner.steps.get_or_create(&of).observe(step.ms / 1e3);
        }
    }

    /// Something happened to a sandbox.
    pub fn event(&self, kind: &'static str) {
        self.inner.events.get_or_create(&OfKind { kind }).inc();
    }

    /// All of it as text, with the gauges as they are now; HTTP adds its own and the end mark.
    #[must_use]
    pub fn text(&self, now: &Gauges) -> String {
        let inner = &self.inner;
        inner.figures.set(now);
        for status in Status::ALL {
            let count = now.sandboxes.iter().find(|(of, _)| *of == status).map_or(0, |(_, count)| *count);
            inner.sandboxes.get_or_create(&OfState { state: status.as_str() }).set(signed(count as u64));
        }
        inner.prestarted.clear();
        for (template, count) in &now.prestarted {
            let of = OfTemplate { template: template.clone() };
            inner.prestarted.get_or_create(&of).set(signed(*count as u64));
        }
        let (version, engine) = now.build.clone();
        inner.build.get_or_create(&OfBuild { version, engine }).set(1);
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = text::encode_registry(&mut text, &inner.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::{Gauges, Metrics};
    use keiki_types::{
        Status,
        api::{Step, Timings},
    };

    fn lines(metrics: &Metrics, of: &str) -> Vec<String> {
        let now = Gauges {
            sandboxes: vec![(Status::Running, 3)],
            prestarted: vec![("base".into(), 2)],
            memory_limit: 1 << 40,
            ..Gauges::default()
        };
        metrics.text(&now).lines().filter(|line| line.starts_with(of)).map(String::from).collect()
    }

    #[test]
    fn verbs_have_steps_and_guests_name_none() {
        let metrics = Metrics::default();
        let step = |name: &str, ms| Step { name: name.into(), ms };
        let steps = vec![
            step("thaw", 3.0),
            step("guest:clock", 0.1),
            step("guest:evil-1", 1.0),
            step("guest:evil-2", 1.0),
        ];
        let timings = Timings { total_ms: 40.0, vcpu_pause_ms: Some(2.0), steps, ..Timings::default() };
        metrics.verb("create", &timings);
        let steps = lines(&metrics, "keiki_verb_step_seconds_count");
        assert_eq!(steps.len(), 3, "{steps:?}");
        assert!(
            steps.contains(&r#"keiki_verb_step_seconds_count{verb="create",step="guest:other"} 2"#.into()),
            "{steps:?}"
        );
        assert_eq!(
            lines(&metrics, "keiki_verb_seconds_sum"),
            [r#"keiki_verb_seconds_sum{verb="create"} 0.04"#]
        );
        let paused = r#"keiki_vcpu_pause_seconds_bucket{le="0.0025",verb="create"} 1"#;
        assert!(lines(&metrics, "keiki_vcpu_pause_seconds_bucket").contains(&paused.into()));
        assert!(lines(&metrics, "keiki_user_pause_seconds_count").is_empty());
    }

    #[test]
    fn gauges_are_those_of_the_moment() {
        let metrics = Metrics::default();
        let states = lines(&metrics, "keiki_sandboxes");
        assert_eq!(states.len(), Status::ALL.len(), "{states:?}");
        assert!(states.contains(&r#"keiki_sandboxes{state="running"} 3"#.into()));
        assert_eq!(lines(&metrics, "keiki_prestarted"), [r#"keiki_prestarted_machines{template="base"} 2"#]);
        assert_eq!(lines(&metrics, "keiki_memory_limit"), ["keiki_memory_limit_bytes 1099511627776"]);
        // A template that is gone is shown no more.
        assert!(!metrics.text(&Gauges::default()).contains("keiki_prestarted_machines{"));
    }
}
