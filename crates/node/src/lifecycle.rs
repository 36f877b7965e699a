//! Which verb a sandbox accepts in which state. Pure: no clock, no I/O, so that every pair is tested.
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

/// What somebody wants of a sandbox.
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
    /// It is so already: success without work.
    Already,
    /// Wake it, then do it.
    WakeFirst,
    /// 409 with this clause.
    Refuse(&'static str),
}

/// The rule.
#[must_use]
pub fn decide(status: Status, verb: Verb) -> Decision {
    use Decision::{Already, Go, Refuse, WakeFirst};
    match (status, verb) {
        (Status::Creating, _) => Refuse("is still being created"),
        (Status::Stopping | Status::Deleted, _) => Refuse("is being deleted"),
        (_, Verb::Delete) => Go,
        (Status::Failed, _) => Refuse("has failed; delete it"),

        (Status::Running, Verb::Resume | Verb::Wake) => Already,
        (Status::Running, _) => Go,

        (Status::Paused, Verb::Pause) => Already,
        (Status::Paused, Verb::Resume | Verb::Freeze | Verb::Hibernate) => Go,
        (Status::Paused, Verb::Use | Verb::Wake) => {
            Refuse("is not running (paused or hibernated) — resume/wake it first")
        }

        (Status::Hibernated, Verb::Hibernate) => Already,
        (Status::Hibernated, Verb::Wake) => Go,
        (Status::Hibernated, Verb::Use | Verb::Freeze) => WakeFirst,
        (Status::Hibernated, Verb::Pause | Verb::Resume) => {
            Refuse("is not running (paused or hibernated) — resume/wake it first")
        }
    }
}

/// What the sweeper does with a sandbox that has been idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Leave it.
    Keep,
    /// Its time is up: delete.
    Delete,
    /// Its time is up and it is persistent: hibernate.
    Hibernate,
}

/// The rule of the TTL. `idle_ms` counts from the last activity; work in flight is activity.
#[must_use]
pub fn sweep(status: Status, idle_ms: u64, ttl_seconds: u64, in_flight: usize, persistent: bool) -> Sweep {
    let over = in_flight == 0 && idle_ms >= ttl_seconds.saturating_mul(1000);
    match status {
        Status::Running | Status::Paused if over && persistent => Sweep::Hibernate,
        Status::Running | Status::Paused if over => Sweep::Delete,
        Status::Failed if over => Sweep::Delete,
        _ => Sweep::Keep,
    }
}

#[cfg(test)]
mod tests {
    use super::{Decision, Sweep, Verb, decide, sweep};
    use keiki_types::Status;
    use proptest::{prelude::any, prop_assert, prop_assert_eq, proptest, sample::select};

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
