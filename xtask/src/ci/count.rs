//! Counts passed and failed tests in the output of test programs.

use std::ops::AddAssign;

/// Numbers of tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) passed: usize,
    pub(super) failed: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

/// Adds up the summaries in the output of a stage. A stage without summaries counts as one test.
pub(super) fn count(output: &str, ok: bool) -> Tally {
    let mut tally = Tally::default();
    for line in output.lines().map(plain).filter(|line| is_summary(line)) {
        let words: Vec<&str> = line.split([' ', ';', ',']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(number) = pair[0].parse::<usize>() else { continue };
            match pair[1] {
                "passed" => tally.passed += number,
                "failed" => tally.failed += number,
                _ => {}
            }
        }
    }
    match ok {
        true if tally == Tally::default() && !is_skipped(output) => tally.passed = 1,
        false if tally.failed == 0 => tally.failed = 1,
        _ => {}
    }
    tally
}

/// Whether the stage says that a tool it needs is not installed.
pub(super) fn is_skipped(output: &str) -> bool {
    output.lines().any(|line| line.starts_with("skipped: "))
}

/// Recognizes summaries of nextest, Rust's test harness and pytest.
fn is_summary(line: &str) -> bool {
    let line = line.trim_start_matches([' ', '=']);
    line.starts_with("Summary [")
        || line.starts_with("test result:")
        || (line.starts_with(|first: char| first.is_ascii_digit())
            && line.contains(" in ")
            && (line.contains(" passed") || line.contains(" failed")))
}

/// Removes colours.
fn plain(line: &str) -> String {
    let mut plain = String::new();
    let mut rest = line;
    while let Some(at) = rest.find("\x1b[") {
        plain += &rest[..at];
        rest = rest[at..].find('m').map_or("", |end| &rest[at + end + 1..]);
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(output: &str, ok: bool) -> (usize, usize) {
        let tally = count(output, ok);
        (tally.passed, tally.failed)
    }

    #[test]
    fn summaries_are_added_up() {
        assert_eq!(
            of(
                "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured\nx\ntest result: FAILED. 4 passed; 2 failed;",
                false
            ),
            (7, 2)
        );
        assert_eq!(
            of(
                "\x1b[32m     Summary\x1b[0m [  12.3s] 7 tests run: 6 passed (1 slow), 1 failed, 2 skipped",
                false
            ),
            (6, 1)
        );
        assert_eq!(of("== 12 passed, 1 warning in 3.20s ==", true), (12, 0));
        assert_eq!(of("1 failed, 2 passed in 0.12s", false), (2, 1));
    }

    #[test]
    fn a_stage_without_tests_is_one() {
        assert_eq!(of("Finished\n", true), (1, 0));
        assert_eq!(of("error: it did not compile\n", false), (0, 1));
        assert_eq!(of("skipped: cargo-deny is not installed\n", true), (0, 0));
        // The stage failed, although no counted test did.
        assert_eq!(of("test result: ok. 3 passed; 0 failed;\nthe node did not stop\n", false), (3, 1));
    }
}
