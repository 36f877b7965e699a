//! How long things took, as results and logs show it.

use keiki_sys::stopwatch::{Steps, Stopwatch};
use keiki_types::api::{Step, Timings};
use std::time::Duration;

/// Milliseconds with microsecond resolution.
pub fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1_000_000.0).round() / 1000.0
}

pub fn steps(steps: &Steps) -> Vec<Step> {
    steps.0.iter().map(|(name, took)| Step { name: name.to_string(), ms: ms(*took) }).collect()
}

/// Times of an operation so far. The caller fills in the typed fields.
pub fn timings(watch: &Stopwatch) -> Timings {
    Timings { total_ms: ms(watch.elapsed()), steps: steps(watch.steps()), ..Timings::default() }
}
