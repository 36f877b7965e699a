//! Metrics of the node, in the Prometheus text format.
//!
//! Two kinds. *Counters and histograms* grow while the node works: a verb that succeeds adds its
//! steps, each at the cost of one lookup in a small table. *Gauges* describe the current state and
//! are collected at each scrape ([`Gauges`]). docs/METRICS.md lists all of them.
//!
//! Labels have few values, whatever callers and guests do: no ids, routes instead of paths, no step
//! names from a guest.

use keiki_api::HISTOGRAM_BOUNDS;
use keiki_types::api::{Step, Timings};
use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use std::sync::atomic::AtomicU64;

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

type Labels<const N: usize> = [(&'static str, String); N];
type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// What is counted.
pub struct Metrics {
    registry: Registry,
    verbs: Histograms<1>,
    steps: Histograms<2>,
    vcpu_pauses: Histograms<1>,
    user_pauses: Histograms<1>,
    events: Family<Labels<1>, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        fn histograms<const N: usize>(registry: &mut Registry, name: &str, help: &str) -> Histograms<N> {
            let family = Histograms::new_with_constructor(|| Histogram::new(HISTOGRAM_BOUNDS));
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
            family
        }
        let mut registry = Registry::default();
        let verbs = histograms(&mut registry, "keiki_verb", "Whole verb at the node");
        let steps = histograms(&mut registry, "keiki_verb_step", "One step of a verb");
        let vcpu_pauses = histograms(&mut registry, "keiki_vcpu_pause", "vCPUs stood still");
        let user_pauses = histograms(&mut registry, "keiki_user_pause", "User processes stood still");
        let events = Family::<Labels<1>, Counter>::default();
        registry.register("keiki_sandbox_events", "Events of sandboxes", events.clone());
        Self { registry, verbs, steps, vcpu_pauses, user_pauses, events }
    }
}

impl Metrics {
    /// A verb that is done, with its steps.
    pub fn verb(&self, verb: &str, timings: &Timings) {
        for (family, ms) in [
            (&self.verbs, Some(timings.total_ms)),
            (&self.vcpu_pauses, timings.vcpu_pause_ms),
            (&self.user_pauses, timings.user_pause_ms),
        ] {
            if let Some(ms) = ms {
                family.get_or_create(&[("verb", verb.into())]).observe(ms / 1e3);
            }
        }
        self.steps(verb, &timings.steps);
    }

    /// Only steps: those of the copies that a verb made in parallel.
    pub fn steps(&self, verb: &str, steps: &[Step]) {
        for step in steps {
            let labels = [("verb", verb.into()), ("step", step_label(&step.name))];
            self.steps.get_or_create(&labels).observe(step.ms / 1e3);
        }
    }

    /// Something happened to a sandbox.
    pub fn event(&self, kind: &str) {
        self.events.get_or_create(&[("kind", kind.into())]).inc();
    }

    /// All of it as text, with the gauges as they are now; HTTP adds its own and the end mark.
    pub fn text(&self, now: &Gauges) -> String {
        let mut text = String::new();
        for registry in [&self.registry, &now.registry] {
            // Writing to a String cannot fail.
            let _ = text::encode_registry(&mut text, registry);
        }
        text
    }
}

/// The current state, at a scrape.
#[derive(Default)]
pub struct Gauges {
    registry: Registry,
}

impl Gauges {
    pub fn bytes(&mut self, name: &str, help: &str, value: u64) {
        self.registry.register_with_unit(name, help, Unit::Bytes, gauge(value));
    }

    pub fn number(&mut self, name: &str, help: &str, value: u64) {
        self.registry.register(name, help, gauge(value));
    }

    /// One number for each of these labels.
    pub fn numbers<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<N>, u64)>,
    ) {
        let family = Family::<_, Gauge>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).set(signed(value));
        }
        self.registry.register(name, help, family);
    }

    /// Seconds that someone else counts.
    pub fn counted_seconds(&mut self, name: &str, help: &str, value: f64) {
        let counter = Counter::<f64, AtomicU64>::default();
        counter.inc_by(value);
        self.registry.register(name, help, counter);
    }
}

fn gauge(value: u64) -> Gauge {
    let gauge = Gauge::default();
    gauge.set(signed(value));
    gauge
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

#[cfg(test)]
mod tests {
    use super::{Gauges, Metrics};
    use keiki_types::api::{Step, Timings};

    fn lines(metrics: &Metrics, of: &str) -> Vec<String> {
        let text = metrics.text(&Gauges::default());
        text.lines().filter(|line| line.starts_with(of)).map(String::from).collect()
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
    fn gauges_have_units_and_labels() {
        let mut now = Gauges::default();
        now.bytes("keiki_memory_limit", "A size", 1 << 40);
        now.bytes("keiki_memory_huge", "A size", u64::MAX);
        now.number("process_threads", "A number", 7);
        now.counted_seconds("process_cpu_seconds", "A counter", 1.5);
        now.numbers("keiki_prestarted_machines", "By template", [([("template", "base".into())], 2)]);
        let text = Metrics::default().text(&now);
        for line in [
            "keiki_memory_limit_bytes 1099511627776",
            "keiki_memory_huge_bytes 9223372036854775807",
            "process_threads 7",
            "process_cpu_seconds_total 1.5",
            r#"keiki_prestarted_machines{template="base"} 2"#,
        ] {
            assert!(text.lines().any(|written| written == line), "{line}: {text}");
        }
    }
}
