//! How long each step took.

use crate::Steps;
use std::{
    borrow::Cow,
    time::{Duration, Instant},
};

/// Times the steps of one operation.
pub(crate) struct Stopwatch {
    last: Instant,
    steps: Steps,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self { last: Instant::now(), steps: Steps::default() }
    }

    /// The time since the last step was this step's.
    pub(crate) fn step(&mut self, name: &'static str) {
        let now = Instant::now();
        self.steps.0.push((Cow::Borrowed(name), now.duration_since(self.last)));
        self.last = now;
        keiki_sys::failpoint::reach(name);
    }

    /// A part of the last step, which somebody else timed.
    pub(crate) fn told(&mut self, name: String, took: Duration) {
        self.steps.0.push((Cow::Owned(name), took));
    }

    pub(crate) fn done(self) -> Steps {
        self.steps
    }
}
