//! What tests of several crates need. No program depends on it.
//!
//! A test that lacks something (root, KVM, a guest kernel) ends early and passes. In CI that would hide a hole, so
//! `make test` sets `KEIKI_TEST_STRICT`, and the test fails instead, unless `KEIKI_TEST_WITHOUT` names what is missing, as
//! in `KEIKI_TEST_WITHOUT=kvm,guest`.

use std::fmt::Display;

const STRICT: &str = "KEIKI_TEST_STRICT";
const WITHOUT: &str = "KEIKI_TEST_WITHOUT";

/// Reports that the calling test cannot run without `need`. The test then returns.
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

/// Whether the caller is root. If not, reports the test as skipped.
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
