//! Kills the process on purpose, in debug builds: with `KEIKI_FAIL=VERB:N` at the N-th step of that
//! verb, with `KEIKI_FAIL=VERB:NAME` at the step of that name.
//!
//! A verb arms the failpoint, and every step of the process counts until the verb ends. So every
//! step has a number without a list of steps, and a test continues with the next number until the
//! verb succeeds. Release builds contain nothing of this.

/// An armed verb; disarmed when dropped.
#[derive(Debug)]
pub struct Armed(bool);

impl Drop for Armed {
    fn drop(&mut self) {
        if self.0 {
            on::disarm();
        }
    }
}

/// A verb starts.
#[must_use]
pub fn arm(verb: &str) -> Armed {
    Armed(on::arm(verb))
}

/// A step of some verb is done.
pub fn reach(step: &str) {
    on::reach(step);
}

#[cfg(debug_assertions)]
mod on {
    use std::sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    };

    /// Steps left. 0: nothing is armed.
    static LEFT: AtomicU32 = AtomicU32::new(0);

    /// A verb and the number or name of one of its steps.
    fn request() -> Option<&'static (String, String)> {
        static REQUEST: OnceLock<Option<(String, String)>> = OnceLock::new();
        let read = || {
            let text = std::env::var("KEIKI_FAIL").ok()?;
            let (verb, step) = text.split_once(':')?;
            Some((verb.to_owned(), step.to_owned()))
        };
        REQUEST.get_or_init(read).as_ref()
    }

    pub(super) fn arm(verb: &str) -> bool {
        let found = request().filter(|(wanted, _)| wanted == verb);
        if let Some((_, step)) = found {
            LEFT.store(step.parse().unwrap_or(u32::MAX), Ordering::SeqCst);
        }
        found.is_some()
    }

    pub(super) fn disarm() {
        LEFT.store(0, Ordering::SeqCst);
    }

    pub(super) fn reach(step: &str) {
        let counted = LEFT.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        let is_named = counted.is_ok() && request().is_some_and(|(_, wanted)| wanted == step);
        if counted == Ok(1) || is_named {
            eprintln!("KEIKI_FAIL: dying after {step}");
            // This returns only on error. Then nothing dies, which the test notices.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}

#[cfg(not(debug_assertions))]
mod on {
    pub(super) fn arm(_: &str) -> bool {
        false
    }

    pub(super) fn disarm() {}

    pub(super) fn reach(_: &str) {}
}
