//! Which verbs a sandbox accepts in which state. Pure: no clock, no I/O, so that every pair is
//! tested.
//!
//! ```text
//!  creating ──> running <──pause/resume──> paused
//!                 │  ▲ └────────┐            │
//!       hibernate │  │ wake     │ machine    │ hibernate
//!                 ▼  │          ▼ ended      ▼
//!             hibernated      failed     hibernated
//!        every state but creating and stopping ──delete──> stopping ──> deleted
//! ```

use keiki_types::Status;
use std::time::{Duration, Instant};

/// An operation on a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Exec, files, terminal: needs a running guest; wakes a hibernated one.
    Use,
    /// Park the vCPUs.
    Pause,
    /// Let them run.
    Resume,
    /// Snapshot or fork: take it at one instant.
    Freeze,
    /// Snapshot and stop, same id.
    Hibernate,
    /// Back from hibernation.
    Wake,
    /// End it for ever.
    Delete,
}

/// What to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Do it.
    Go,
    /// It is in that state already: success without work.
    Already,
    /// Wake it, then do it.
    WakeFirst,
    /// 409 with this clause.
    Refuse(&'static str),
}

/// The rule.
pub fn decide(status: Status, verb: Verb) -> Decision {
    use Decision::{Already, Go, Refuse, WakeFirst};
    match (status, verb) {
        (Status::Creating, _) => Refuse("is still being created"),
        (Status::Stopping | Status::Deleted, _) => Refuse("is being deleted"),
        (_, Verb::Delete) => Go,
        (Status::Failed, _) => Refuse("has failed: delete it"),

        (Status::Running, Verb::Resume | Verb::Wake) => Already,
        (Status::Running, _) => Go,

        (Status::Paused, Verb::Pause) => Already,
        (Status::Paused, Verb::Resume | Verb::Freeze | Verb::Hibernate) => Go,
        (Status::Paused, Verb::Use | Verb::Wake) => Refuse("is paused: resume it first"),

        (Status::Hibernated, Verb::Hibernate) => Already,
        (Status::Hibernated, Verb::Wake) => Go,
        (Status::Hibernated, Verb::Use | Verb::Freeze) => WakeFirst,
        (Status::Hibernated, Verb::Pause | Verb::Resume) => Refuse("is hibernated: wake it first"),
    }
}

/// What the sweeper does with a sandbox that has been idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Leave it.
    Keep,
    /// Its time is up: delete.
    Delete,
    /// Its TTL has expired and it is persistent: hibernate.
    Hibernate,
}

/// The rule of the TTL. `idle_ms` counts from the last activity; work in flight is activity.
pub fn sweep(status: Status, idle_ms: u64, ttl_seconds: u64, in_flight: usize, persistent: bool) -> Sweep {
    let over = in_flight == 0 && idle_ms >= ttl_seconds.saturating_mul(1000);
    match status {
        Status::Running | Status::Paused if over && persistent => Sweep::Hibernate,
        Status::Running | Status::Paused if over => Sweep::Delete,
        Status::Failed if over => Sweep::Delete,
        _ => Sweep::Keep,
    }
}

/// Whether a use or the expiry came first. Every step is atomic, under one lock: in whatever order
/// they arrive, a use that has begun keeps the sweeper off, and one that comes later waits for what
/// it does.
#[derive(Debug, Clone, Copy)]
pub struct IdleTracker {
    in_flight: usize,
    last_activity: Instant,
    /// Its machine is about to be taken away (hibernation): new uses wait for the outcome.
    leaving: bool,
}

/// What a use that begins now may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It has begun.
    Begun,
    /// Ask again when the running verb is done.
    Wait,
    /// Wake it first.
    WakeFirst,
    /// 409 with this clause.
    Refuse(&'static str),
}

impl IdleTracker {
    /// Nothing in flight, active now.
    pub fn new(now: Instant) -> Self {
        Self { in_flight: 0, last_activity: now, leaving: false }
    }

    /// A use arrives.
    pub fn arrive(&mut self, status: Status, now: Instant) -> Arrival {
        if self.leaving {
            return Arrival::Wait;
        }
        match decide(status, Verb::Use) {
            Decision::Go | Decision::Already => {
                self.in_flight += 1;
                self.last_activity = now;
                Arrival::Begun
            }
            Decision::WakeFirst => Arrival::WakeFirst,
            Decision::Refuse(why) => Arrival::Refuse(why),
        }
    }

    /// A use that had begun ends.
    pub fn depart(&mut self, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.last_activity = now;
    }

    /// Counts as activity.
    pub fn touch(&mut self, now: Instant) {
        self.last_activity = now;
    }

    /// From now on new uses wait, or no longer do.
    pub fn set_leaving(&mut self, leaving: bool) {
        self.leaving = leaving;
    }

    /// Since the last activity; zero while something is in flight.
    pub fn idle(&self, now: Instant) -> Duration {
        if self.in_flight > 0 { Duration::ZERO } else { now.saturating_duration_since(self.last_activity) }
    }

    /// The sweeper looks. If it is to hibernate, new uses wait from now on; if it is to delete, the
    /// caller marks that in the same step.
    pub fn sweep(&mut self, status: Status, now: Instant, ttl_seconds: u64, persistent: bool) -> Sweep {
        let idle = u64::try_from(self.idle(now).as_millis()).unwrap_or(u64::MAX);
        let verdict = sweep(status, idle, ttl_seconds, self.in_flight, persistent);
        if verdict == Sweep::Hibernate {
            self.leaving = true;
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::{Arrival, Decision, IdleTracker, Sweep, Verb, decide, sweep};
    use keiki_types::Status;
    use proptest::{
        prelude::{ProptestConfig, any, prop},
        prop_assert, prop_assert_eq, prop_oneof, proptest,
        sample::select,
        strategy::{Just, Strategy},
    };
    use std::time::{Duration, Instant};

    /// What happens to a sandbox, each a step under its lock.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Pass(u64),
        Arrive,
        Depart,
        Sweep,
        /// The verb that the sweeper or a waiting use began is done, or has failed.
        Finish(bool),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0u64..2500).prop_map(Step::Pass),
            Just(Step::Arrive),
            Just(Step::Depart),
            Just(Step::Sweep),
            any::<bool>().prop_map(Step::Finish),
        ];
        prop::collection::vec(step, 1..120)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// Against a model that knows only when uses came and went.
        #[test]
        fn whoever_arrives_first_wins(steps in steps(), ttl in 1u64..3, persistent in any::<bool>()) {
            let mut now = Instant::now();
            let mut tracker = IdleTracker::new(now);
            let mut status = Status::Running;
            let (mut uses, mut active, mut claimed) = (0usize, now, None);
            for step in steps {
                match step {
                    Step::Pass(ms) => now += Duration::from_millis(ms),
                    Step::Arrive => {
                        let expected = match (claimed, status) {
                            (Some(Sweep::Hibernate), _) => Arrival::Wait,
                            (_, Status::Running) => Arrival::Begun,
                            (_, Status::Hibernated) => Arrival::WakeFirst,
                            _ => Arrival::Refuse("is being deleted"),
                        };
                        prop_assert_eq!(tracker.arrive(status, now), expected);
                        match expected {
                            Arrival::Begun => (uses, active) = (uses + 1, now),
                            // As `begin` does: it wakes, and asks again.
                            Arrival::WakeFirst => {
                                status = Status::Running;
                                tracker.touch(now);
                                prop_assert_eq!(tracker.arrive(status, now), Arrival::Begun);
                                (uses, active) = (uses + 1, now);
                            }
                            _ => {}
                        }
                    }
                    Step::Depart if uses > 0 => {
                        tracker.depart(now);
                        (uses, active) = (uses - 1, now);
                    }
                    // The sweeper leaves alone what a verb holds.
                    Step::Sweep if claimed.is_none() => {
                        let due = uses == 0 && now - active >= Duration::from_secs(ttl);
                        let expected = match (status, due, persistent) {
                            (Status::Running, true, true) => Sweep::Hibernate,
                            (Status::Running, true, false) => Sweep::Delete,
                            _ => Sweep::Keep,
                        };
                        prop_assert_eq!(tracker.sweep(status, now, ttl, persistent), expected);
                        if expected != Sweep::Keep {
                            // No use is cut off: none was in flight, and none can start.
                            claimed = Some(expected);
                            if expected == Sweep::Delete {
                                status = Status::Stopping;
                            }
                        }
                    }
                    Step::Finish(done) => match claimed.take() {
                        Some(Sweep::Hibernate) => {
                            tracker.set_leaving(false);
                            if done {
                                status = Status::Hibernated;
                            } else {
                                tracker.touch(now);
                                active = now;
                            }
                        }
                        Some(Sweep::Delete) if done => status = Status::Deleted,
                        Some(Sweep::Delete) => {
                            status = Status::Running;
                            tracker.touch(now);
                            active = now;
                        }
                        _ => {}
                    },
                    Step::Depart | Step::Sweep => {}
                }
                prop_assert!(uses == 0 || status == Status::Running, "{uses} uses of what is {status}");
            }
        }
    }

    const VERBS: [Verb; 7] =
        [Verb::Use, Verb::Pause, Verb::Resume, Verb::Freeze, Verb::Hibernate, Verb::Wake, Verb::Delete];

    #[test]
    fn a_settled_sandbox_can_always_be_deleted() {
        for status in Status::ALL {
            let settled = !matches!(status, Status::Creating | Status::Stopping | Status::Deleted);
            assert_eq!(decide(status, Verb::Delete) == Decision::Go, settled, "{status}");
        }
    }

    #[test]
    fn only_a_running_sandbox_is_used_directly() {
        for status in Status::ALL {
            assert_eq!(decide(status, Verb::Use) == Decision::Go, status == Status::Running, "{status}");
        }
        assert_eq!(decide(Status::Hibernated, Verb::Use), Decision::WakeFirst);
    }

    #[test]
    fn waking_is_only_offered_where_wake_is_accepted() {
        for status in Status::ALL {
            for verb in VERBS {
                if decide(status, verb) == Decision::WakeFirst {
                    assert_eq!(decide(status, Verb::Wake), Decision::Go, "{status} {verb:?}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn nothing_in_flight_is_ever_swept(
            status in select(Status::ALL.to_vec()), idle in any::<u64>(), ttl in any::<u64>(),
            busy in 1usize..9, persistent in any::<bool>(),
        ) {
            prop_assert_eq!(sweep(status, idle, ttl, busy, persistent), Sweep::Keep);
        }

        #[test]
        fn persistent_sandboxes_are_never_deleted_unless_failed(
            status in select(Status::ALL.to_vec()), idle in any::<u64>(), ttl in any::<u64>(),
        ) {
            let verdict = sweep(status, idle, ttl, 0, true);
            prop_assert!(verdict != Sweep::Delete || status == Status::Failed);
        }

        #[test]
        fn who_is_over_the_time_goes(
            status in select(vec![Status::Running, Status::Paused]), ttl in 1u64..1_000_000, over in 0u64..1_000_000,
            persistent in any::<bool>(),
        ) {
            let expected = if persistent { Sweep::Hibernate } else { Sweep::Delete };
            prop_assert_eq!(sweep(status, ttl * 1000 + over, ttl, 0, persistent), expected);
        }

        #[test]
        fn nobody_is_swept_before_the_time(
            status in select(Status::ALL.to_vec()), ttl in 1u64..1_000_000, early in 1u64..1000,
            persistent in any::<bool>(),
        ) {
            prop_assert_eq!(sweep(status, ttl * 1000 - early, ttl, 0, persistent), Sweep::Keep);
        }
    }
}
