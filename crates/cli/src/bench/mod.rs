//! Measuring a node from outside, as its users meet it.
//!
//! Client-side metrics run from the request to the first event of a command (`true` has no output, so its exit
//! is the first); `restore_step`, `fork_pause` and `fork_user_pause` are what the node measured of itself. All
//! samples are kept and percentiles are samples, never interpolated.

mod dirtier;
mod machine;
mod metrics;
mod stats;

pub use metrics::{Bench, first_event};

use serde::Serialize;
use serde_json::{Map, Value};

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Metric {
    /// Create: request to vCPU running, measured by the node
    RestoreStep,
    /// Create, then `true`: request to first event
    CreateFirstExec,
    /// Delete: everything freed
    Kill,
    /// `true` in a running sandbox; idle and dirtying
    ExecRoundtrip,
    /// Fork: how long vCPUs and user processes stood still, 64 MiB freshly dirtied; idle and dirtying
    ForkPause,
    /// Fork, then `true` in the child: request to first event; idle and dirtying
    ForkFirstExec,
    /// Fork of eight, until each child answered
    Fork8All,
    /// Memory of a child that does nothing
    PssPerIdleChild,
    /// Snapshot: request to durable
    Snapshot,
    /// Boot of the template's kernel, for comparison
    ColdBoot,
}

/// What a run found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Where.
    pub machine: machine::Machine,
    /// What ran the sandboxes.
    pub engine: String,
    /// One per metric and set of parameters.
    pub results: Vec<Measured>,
}

/// One metric.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// Its name.
    pub name: &'static str,
    /// What was set.
    pub params: Map<String, Value>,
    /// Samples.
    pub n: usize,
    /// Half are at most this.
    pub p50: f64,
    /// Nine of ten are at most this.
    pub p90: f64,
    /// All but one of a hundred are at most this.
    pub p99: f64,
    /// `ms` or `MiB`.
    pub unit: &'static str,
}

impl Measured {
    /// None without samples.
    fn new(name: &'static str, unit: &'static str, params: Value, samples: &[f64]) -> Option<Self> {
        let at = |percent| stats::percentile(samples, percent);
        let params = match params {
            Value::Object(params) => params,
            _ => Map::new(),
        };
        Some(Self { name, params, n: samples.len(), p50: at(50)?, p90: at(90)?, p99: at(99)?, unit })
    }
}
