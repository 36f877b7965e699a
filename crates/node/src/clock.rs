//! Stopwatch of one operation: laps become the steps that results and logs carry.

use keiki_types::api::{Step, Timings};
use std::time::{Duration, Instant};

/// Started when the request arrives.
#[derive(Debug, Clone)]
pub struct Clock {
    started: Instant,
    last: Instant,
    steps: Vec<Step>,
}

impl Clock {
    /// Starts now.
    #[must_use]
    pub fn start() -> Self {
        let now = Instant::now();
        Self { started: now, last: now, steps: Vec::new() }
    }

    /// Ends a step that began with the previous one's end.
    pub fn lap(&mut self, name: &str) -> Duration {
        let now = Instant::now();
        let took = now - self.last;
        self.last = now;
        self.steps.push(Step { name: name.into(), ms: ms(took) });
        keiki_sys::failpoint::reach(name);
        took
    }

    /// Adds steps that somebody else timed within the current one.
    pub fn note(&mut self, name: &str, took: Duration) {
        self.steps.push(Step { name: name.into(), ms: ms(took) });
    }

    /// Since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// As results show it; the caller fills in the named figures.
    #[must_use]
    pub fn timings(&self) -> Timings {
        Timings { total_ms: ms(self.elapsed()), steps: self.steps.clone(), ..Timings::default() }
    }
}

/// Milliseconds with microsecond resolution.
#[must_use]
pub fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1_000_000.0).round() / 1000.0
}
