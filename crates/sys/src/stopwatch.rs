//! How long each step of an operation took.
//!
//! Steps are for people and for metrics. Code that needs a number takes it from [`Stopwatch::lap`]
//! or from a typed field, never by the name of a step.

use crate::failpoint;
use std::{
    borrow::Cow,
    time::{Duration, Instant},
};

/// Steps in order, each with its name and the time it took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Steps(pub Vec<(Cow<'static, str>, Duration)>);

/// Times the steps of one operation.
#[derive(Debug, Clone)]
pub struct Stopwatch {
    started: Instant,
    last: Instant,
    steps: Steps,
}

impl Stopwatch {
    #[must_use]
    pub fn start() -> Self {
        let now = Instant::now();
        Self { started: now, last: now, steps: Steps::default() }
    }

    /// Ends the current step, names it and reaches the failpoint of that name. The next step begins
    /// here.
    pub fn lap(&mut self, name: &'static str) -> Duration {
        let now = Instant::now();
        let took = now - self.last;
        self.last = now;
        self.note(name, took);
        failpoint::reach(name);
        took
    }

    /// Adds a part of a step that was timed elsewhere.
    pub fn note(&mut self, name: impl Into<Cow<'static, str>>, took: Duration) {
        self.steps.0.push((name.into(), took));
    }

    /// Adds the steps of another stopwatch that ran from the end of this one's last step, and
    /// continues where its last step ended.
    pub fn follow(&mut self, other: &Self) {
        self.last = other.last;
        self.steps.0.extend_from_slice(&other.steps.0);
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    #[must_use]
    pub fn steps(&self) -> &Steps {
        &self.steps
    }

    #[must_use]
    pub fn into_steps(self) -> Steps {
        self.steps
    }
}

#[cfg(test)]
mod tests {
    use super::Stopwatch;
    use std::{thread::sleep, time::Duration};

    #[test]
    fn one_that_follows_another_counts_no_time_twice() {
        let mut whole = Stopwatch::start();
        whole.lap("before");
        let mut part = Stopwatch::start();
        sleep(Duration::from_millis(50));
        part.lap("part");
        whole.follow(&part);
        assert!(whole.lap("after") < Duration::from_millis(50));
        let names: Vec<_> = whole.steps().0.iter().map(|(name, _)| name.as_ref()).collect();
        assert_eq!(names, ["before", "part", "after"]);
    }

    #[test]
    fn laps_follow_each_other_and_notes_take_no_time() {
        let mut watch = Stopwatch::start();
        sleep(Duration::from_millis(5));
        let first = watch.lap("first");
        watch.note(String::from("elsewhere"), Duration::from_secs(9));
        sleep(Duration::from_millis(1));
        let second = watch.lap("second");
        assert!(first >= Duration::from_millis(5) && second >= Duration::from_millis(1));
        assert!(first + second <= watch.elapsed());
        let steps = watch.into_steps().0;
        let names: Vec<_> = steps.iter().map(|(name, _)| name.as_ref()).collect();
        assert_eq!(names, ["first", "elsewhere", "second"]);
        assert_eq!(
            steps.iter().map(|(_, took)| *took).sum::<Duration>(),
            first + second + Duration::from_secs(9)
        );
    }
}
