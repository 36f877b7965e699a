//! Every test and gate; what CI runs, by `scripts/test.sh`.
//!
//! `cargo xtask ci [STAGE...]` runs the stages in order, and two at a time where one waits while another computes
//! (`stage.rs`). A failed stage stops only those that need it, so one run shows everything that is wrong. The output of
//! each stage is in `.keiki/logs/`. The last line is `N passed, N failed`.
//!
//! | variable | meaning |
//! |---|---|
//! | `KEIKI_TEST_ALL=1` | include the long tests; an interrupted run resumes, unless the tree has changed (`state.rs`) |
//! | `KEIKI_TEST_STRICT=0` | let tests skip themselves where something is missing |
//! | `KEIKI_TEST_WITHOUT=kvm,...` | what is known to be missing here (`crates/testing`) |

mod count;
mod run;
mod stage;
mod state;

use anyhow::{Result, bail};
use count::Tally;
use stage::{STAGES, Stage};
use state::State;
use std::{path::PathBuf, process::ExitCode, sync::mpsc, time::Instant};

/// The options of a run, and where things are.
struct Settings {
    root: PathBuf,
    target: PathBuf,
    /// Include the long tests.
    long: bool,
}

impl Settings {
    fn from_env() -> Result<Self> {
        let root = crate::root()?;
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        Ok(Self { root, target, long: std::env::var_os("KEIKI_TEST_ALL").is_some() })
    }

    /// A path in the state directory, which `make clean` removes.
    fn state(&self, name: &str) -> PathBuf {
        self.root.join(".keiki").join(name)
    }
}

/// The result of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outcome {
    name: String,
    word: String,
    tally: Tally,
    seconds: u64,
}

impl Outcome {
    fn ok(&self) -> bool {
        self.tally.failed == 0
    }
}

/// Runs `cargo xtask ci STAGES`.
pub(crate) fn run(names: &[String]) -> Result<ExitCode> {
    let settings = Settings::from_env()?;
    let begun = Instant::now();
    let chosen = chosen(names)?;
    let mut state = State::open(&settings, names.is_empty())?;
    run::forward_signals()?;
    let outcomes = schedule(&settings, chosen, &mut state)?;
    let mut sum = Tally::default();
    println!();
    for outcome in &outcomes {
        println!("{:<12} {:<8} {:>5} s", outcome.name, outcome.word, outcome.seconds);
        sum += outcome.tally;
    }
    println!("{} stages in {} s", outcomes.len(), begun.elapsed().as_secs());
    println!("{} passed, {} failed", sum.passed, sum.failed);
    state.finish(&outcomes)?;
    Ok(if sum.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(names: &[String]) -> Result<Vec<Stage>> {
    if names.is_empty() {
        return Ok(STAGES.iter().copied().filter(|stage| stage.usual).collect());
    }
    let mut chosen = Vec::new();
    for name in names {
        let Some(stage) = Stage::named(name) else {
            let known: Vec<_> = STAGES.iter().map(|stage| stage.name).collect();
            bail!("no stage {name}: {}", known.join(" "));
        };
        chosen.push(stage);
    }
    Ok(chosen)
}

/// Starts each stage once the stages it needs have ended and it may run beside those that still run. Returns the results
/// in the order of the stages.
fn schedule(settings: &Settings, stages: Vec<Stage>, state: &mut State) -> Result<Vec<Outcome>> {
    let order = stages.clone();
    let (mut waiting, mut running, mut done) = (stages, Vec::<Stage>::new(), Vec::<Outcome>::new());
    let (ended, ends) = mpsc::channel();
    let terminal = run::Terminal::default();
    std::thread::scope(|scope| -> Result<()> {
        while !(waiting.is_empty() && running.is_empty()) {
            while let Some(at) = next(&waiting, &running, &done) {
                let stage = waiting.remove(at);
                if let Some(outcome) = settled(&stage, &done, state) {
                    println!("== {}: {}", stage.name, outcome.word);
                    done.push(outcome);
                    continue;
                }
                running.push(stage);
                let (ended, terminal) = (ended.clone(), &terminal);
                scope.spawn(move || ended.send((stage, run::stage(settings, &stage, terminal))));
            }
            if running.is_empty() {
                continue;
            }
            let (stage, outcome) = ends.recv()?;
            let outcome = outcome?;
            running.retain(|other| *other != stage);
            state.note(&outcome)?;
            done.push(outcome);
        }
        Ok(())
    })?;
    let place = |outcome: &Outcome| order.iter().position(|stage| stage.name == outcome.name);
    done.sort_by_key(place);
    Ok(done)
}

/// The first waiting stage that can start now. No stage overtakes one that must run alone.
fn next(waiting: &[Stage], running: &[Stage], done: &[Outcome]) -> Option<usize> {
    let undecided = |need: &str| {
        waiting.iter().chain(running).any(|stage| stage.name == need)
            && !done.iter().any(|outcome| outcome.name == need)
    };
    for (at, stage) in waiting.iter().enumerate() {
        let may = running.iter().all(|other| stage.runs_beside(other));
        if may && !stage.needs.iter().any(|need| undecided(need)) {
            return Some(at);
        }
        if stage.kind == stage::Kind::Alone {
            return None;
        }
    }
    None
}

/// The result of a stage that does not run: it has passed before, or a stage it needs has failed.
fn settled(stage: &Stage, done: &[Outcome], state: &State) -> Option<Outcome> {
    if let Some(before) = state.passed(stage.name) {
        return Some(before);
    }
    let failed = |need: &&&str| done.iter().any(|outcome| outcome.name == **need && !outcome.ok());
    let need = stage.needs.iter().find(failed)?;
    let tally = Tally { passed: 0, failed: 1 };
    let word = format!("FAILED (needs {need})");
    Some(Outcome { name: stage.name.to_owned(), word, tally, seconds: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(names: &[&str]) -> Vec<Stage> {
        names.iter().map(|name| Stage::named(name).unwrap()).collect()
    }

    fn outcome(name: &str, failed: usize) -> Outcome {
        Outcome { name: name.into(), word: String::new(), tally: Tally { passed: 1, failed }, seconds: 1 }
    }

    #[test]
    fn what_may_run_beside_each_other_does() {
        let waiting = stages(&["template", "unit", "guests", "e2e", "conformance"]);
        let built = [outcome("build", 0)];
        assert_eq!(next(&waiting, &[], &built), Some(0));
        assert_eq!(next(&waiting[1..], &stages(&["template"]), &built), Some(0));
        // No stage overtakes one that must run alone.
        assert_eq!(next(&waiting[2..], &stages(&["unit"]), &built), None);
        let after = [outcome("build", 0), outcome("template", 0)];
        assert_eq!(next(&waiting[3..], &[], &after), Some(0));
        assert_eq!(next(&waiting[4..], &stages(&["e2e"]), &after), Some(0));
        // A stage that it needs has not ended.
        assert_eq!(next(&stages(&["template"]), &stages(&["build"]), &[]), None);
    }

    #[test]
    fn what_needs_a_failed_stage_fails() {
        let state = State::default();
        let e2e = Stage::named("e2e").unwrap();
        let failed = settled(&e2e, &[outcome("build", 0), outcome("template", 1)], &state).unwrap();
        assert_eq!((failed.word.as_str(), failed.ok()), ("FAILED (needs template)", false));
        assert_eq!(settled(&e2e, &[outcome("build", 0), outcome("unit", 1)], &state), None);
    }

    #[test]
    fn stages_are_named() {
        assert!(chosen(&[]).unwrap().iter().all(|stage| stage.name != "lab-all"));
        assert_eq!(chosen(&["lab-all".into()]).unwrap().len(), 1);
        assert!(chosen(&["nonsense".into()]).unwrap_err().to_string().contains("conformance"));
    }
}
