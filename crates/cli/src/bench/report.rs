//! The report of a run.

use super::{machine::Machine, pick::Metric, stats};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The results of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    pub machine: Machine,
    pub engine: String,
    /// One per metric and set of parameters.
    pub results: Vec<Measured>,
    /// Run time; of merged reports, their sum.
    #[serde(default)]
    pub took_seconds: f64,
    /// What was not measured, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
}

impl Report {
    /// Merges a later run, whose results replace those with the same name and parameters.
    pub fn add(&mut self, later: Report) {
        for result in later.results {
            match self.results.iter_mut().find(|known| known.is_same(&result)) {
                Some(known) => *known = result,
                None => self.results.push(result),
            }
        }
        self.took_seconds += later.took_seconds;
        self.machine = later.machine;
        self.engine = later.engine;
        self.left_out = later.left_out;
    }
}

/// Something that was not measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    pub what: String,
    pub why: String,
    /// The node failed, as opposed to: it cannot be measured here.
    pub failed: bool,
}

/// One metric under one set of parameters.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    pub name: String,
    pub params: Map<String, Value>,
    /// Number of samples.
    pub n: usize,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    /// `ms`, `MiB` or `ratio`.
    pub unit: String,
}

impl Measured {
    /// None without samples.
    pub fn new(metric: Metric, params: Value, samples: &[f64]) -> Option<Self> {
        let at = |percent| stats::percentile(samples, percent);
        let params = match params {
            Value::Object(params) => params,
            _ => Map::new(),
        };
        let (name, unit) = (metric.name(), metric.unit().into());
        Some(Self { name, params, n: samples.len(), p50: at(50)?, p90: at(90)?, p99: at(99)?, unit })
    }

    /// Is it the same metric under the same conditions?
    pub fn is_same(&self, other: &Self) -> bool {
        self.name == other.name && self.params == other.params
    }
}

/// Parameters on one line.
pub fn conditions(params: &Map<String, Value>) -> String {
    let params: Vec<String> = params.iter().map(|(key, value)| format!("{key}={value}")).collect();
    params.join(" ").replace('"', "")
}

#[cfg(test)]
pub(super) mod tests {
    use super::{Machine, Measured, Metric, Report};
    use serde_json::json;

    pub(in crate::bench) fn report(results: &[(Metric, serde_json::Value, f64)]) -> Report {
        let measured = |(metric, params, value): &(Metric, serde_json::Value, f64)| {
            Measured::new(*metric, params.clone(), &[*value]).unwrap()
        };
        Report {
            machine: Machine::here(),
            engine: "qemu 10".into(),
            results: results.iter().map(measured).collect(),
            took_seconds: 1.0,
            left_out: Vec::new(),
        }
    }

    #[test]
    fn a_later_run_replaces_what_it_measured_anew_and_keeps_the_rest() {
        let mut first = report(&[
            (Metric::Kill, json!({}), 1.0),
            (Metric::ForkAll, json!({"children": 1}), 2.0),
            (Metric::ForkAll, json!({"children": 10}), 3.0),
        ]);
        first.add(report(&[
            (Metric::ForkAll, json!({"children": 10}), 4.0),
            (Metric::Snapshot, json!({}), 5.0),
        ]));
        let values: Vec<_> = first.results.iter().map(|result| (result.name.as_str(), result.p50)).collect();
        assert!((first.took_seconds - 2.0).abs() < 1e-9);
        assert_eq!(values, [("kill", 1.0), ("fork_all", 2.0), ("fork_all", 4.0), ("snapshot", 5.0)]);
    }

    #[test]
    fn the_shape_of_the_report_is_read_back_also_without_what_was_added_since() {
        let written = serde_json::to_value(report(&[(Metric::Kill, json!({"a": "b"}), 1.5)])).unwrap();
        let keys: Vec<_> = written.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["engine", "machine", "results", "took_seconds"]);
        let read: Report = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), written);
        assert_eq!(super::conditions(&read.results[0].params), "a=b");
        let mut old = written;
        old.as_object_mut().unwrap().remove("took_seconds");
        assert_eq!(serde_json::from_value::<Report>(old).unwrap().results.len(), 1);
    }
}
