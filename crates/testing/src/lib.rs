//! What tests of several crates need. No program depends on it.
//!
//! A test that lacks something (root, KVM, a guest kernel) ends early and passes: fine on a laptop, a hole in CI. Where
//! `KEIKI_TEST_STRICT` is set, as `make test` does, it fails instead, unless `KEIKI_TEST_WITHOUT` names what is missing:
//! a list of words with commas between, as in `KEIKI_TEST_WITHOUT=kvm,guest`.

use std::fmt::Display;

const STRICT: &str = "KEIKI_TEST_STRICT";
const WITHOUT: &str = "KEIKI_TEST_WITHOUT";

/// Says that the calling test cannot run for want of `need`; the test then returns.
///
/// # Panics
/// In a strict run that does not name `need` as missing.
#[track_caller]
pub fn skip(need: &str, why: impl Display) {
    let var = |name| std::env::var(name).unwrap_or_default();
    assert!(
        may_skip(need, &var(STRICT), &var(WITHOUT)),
        "this test needs {need} ({why}): {STRICT} is set, and {WITHOUT} does not name it"
    );
    eprintln!("skipped: {why}");
}

fn may_skip(need: &str, strict: &str, without: &str) -> bool {
    matches!(strict, "" | "0") || without.split(',').any(|word| word.trim() == need)
}

/// Whether this is root; if not, the test is skipped.
///
/// # Panics
/// As [`skip`].
#[track_caller]
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip("root", "needs root");
    }
    root
}

#[cfg(test)]
mod tests {
    use super::may_skip;

    #[test]
    fn a_strict_run_skips_only_what_it_names() {
        assert!(may_skip("kvm", "", ""));
        assert!(may_skip("kvm", "0", ""));
        assert!(!may_skip("kvm", "1", ""));
        assert!(!may_skip("kvm", "1", "guest,kvm-other"));
        assert!(may_skip("kvm", "1", "guest, kvm"));
    }
}
