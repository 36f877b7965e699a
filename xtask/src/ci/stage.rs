//! The stages: what each runs, which others it needs, and what it may run beside.

use super::Settings;
use std::{ffi::OsStr, process::Command};

/// A stage of the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stage {
    pub(super) name: &'static str,
    /// Stages that must have passed before.
    pub(super) needs: &'static [&'static str],
    pub(super) kind: Kind,
    /// Whether it runs when no stage is named.
    pub(super) usual: bool,
}

/// What a stage mostly uses. Stages of one kind run one after the other, of different kinds in parallel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Runs in parallel with nothing.
    Alone,
    /// The processors.
    Build,
    /// The network.
    Fetch,
    /// Guests on all processors.
    Guests,
    /// One node and its clients.
    Client,
}

const fn stage(name: &'static str, kind: Kind, needs: &'static [&'static str]) -> Stage {
    Stage { name, needs, kind, usual: true }
}

/// In the order in which they start.
pub(super) const STAGES: &[Stage] = &[
    stage("setup", Kind::Alone, &[]),
    stage("fmt", Kind::Build, &[]),
    stage("tidy", Kind::Build, &[]),
    stage("deny", Kind::Build, &[]),
    stage("clippy", Kind::Build, &[]),
    stage("build", Kind::Build, &["setup"]),
    stage("template", Kind::Fetch, &["build"]),
    stage("unit", Kind::Build, &[]),
    stage("guests", Kind::Alone, &["build", "template"]),
    stage("e2e", Kind::Guests, &["build", "template"]),
    stage("conformance", Kind::Client, &["build", "template"]),
    stage("sdk", Kind::Client, &["build", "template"]),
    stage("lab", Kind::Guests, &["build", "template"]),
    Stage { usual: false, ..stage("lab-all", Kind::Alone, &["build", "template"]) },
];

/// The end to end tests that `lab` runs on our own monitor; `lab-all` runs all.
const LAB: &str = "state::memory lifecycle::paused lineage::a_fork_of_a_fork clones::identity clones::hooks \
                   clones::connections clones::secrets memory::";

impl Stage {
    pub(super) fn named(name: &str) -> Option<Self> {
        STAGES.iter().copied().find(|stage| stage.name == name)
    }

    /// Whether the two may run at the same time.
    pub(super) fn runs_beside(&self, other: &Self) -> bool {
        self.kind != Kind::Alone && other.kind != Kind::Alone && self.kind != other.kind
    }

    /// The commands it runs in order. A failed one does not stop the others.
    pub(super) fn commands(&self, settings: &Settings) -> Vec<Command> {
        let script = |name: &str| vec![command(&format!("scripts/stages/{name}.sh"), [""; 0])];
        match self.name {
            "setup" => vec![command("scripts/setup.sh", [""; 0])],
            "fmt" => vec![cargo(["fmt", "--all", "--check"])],
            "tidy" => vec![cargo(["xtask", "tidy"])],
            "deny" if !installed("deny") => vec![said(
                "skipped: cargo-deny is not installed; bans, licences and sources were not checked",
            )],
            "deny" => vec![cargo(["deny", "--offline", "check", "bans", "licenses", "sources"])],
            "clippy" => clippy(settings),
            "build" => vec![command("scripts/build.sh", ["dev"])],
            "unit" => vec![unit(settings)],
            "e2e" => {
                let mut run = script("e2e");
                if settings.long {
                    run[0].env("KEIKI_E2E_LONG", "1").env("KEIKI_E2E_PASSED", settings.state("e2e.passed"));
                }
                run
            }
            "conformance" => {
                let mut run = script("conformance");
                if settings.long {
                    run[0].arg("600");
                }
                run
            }
            // The end to end tests use the ranges from 10.213 on at the same time.
            "sdk" => {
                let mut run = script("sdk");
                if std::env::var_os("KEIKI_SLOT_RANGE").is_none() {
                    run[0].env("KEIKI_SLOT_RANGE", "10.212.0.0/20");
                }
                run
            }
            "lab" => {
                let filter = std::env::var("KEIKI_LAB_FILTER").unwrap_or_else(|_| LAB.to_owned());
                let mut run = command("scripts/lab.sh", ["e2e"].into_iter().chain(filter.split_whitespace()));
                if std::env::var_os("KEIKI_LAB_LIMIT").is_none() {
                    run.env("KEIKI_LAB_LIMIT", "360");
                }
                vec![run]
            }
            "lab-all" => vec![command("scripts/lab.sh", ["all"])],
            other => script(other),
        }
    }
}

fn clippy(settings: &Settings) -> Vec<Command> {
    let fuzz = settings.target.join("fuzz");
    let mut of_fuzz =
        cargo(["clippy", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--no-default-features"]);
    // Without the fuzzer, which is C++ (scripts/fuzz.sh). The unit tests run the targets on their seeds.
    of_fuzz.arg("--target-dir").arg(fuzz).args(["--", "-D", "warnings"]);
    vec![cargo(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]), of_fuzz]
}

/// Uses nextest if it is installed: it runs more in parallel and names slow tests.
fn unit(settings: &Settings) -> Command {
    let mut tests = if installed("nextest") {
        cargo(["nextest", "run", "--locked", "--workspace", "--no-tests", "pass"])
    } else {
        cargo(["test", "--locked", "--workspace", "--no-fail-fast"])
    };
    // Tests that need these run in other stages: guests, template, lab.
    let mut without = vec!["guest", "image", "engine"];
    if !settings.long {
        without.push("swap");
    }
    if !std::path::Path::new("/dev/kvm").exists() {
        without.push("kvm");
    }
    // A KVM without processor support emulates, and cannot set the time stamp counter.
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !cpu.split_whitespace().any(|flag| ["vmx", "svm"].contains(&flag)) {
        without.push("tsc");
    }
    let named = std::env::var("KEIKI_TEST_WITHOUT").unwrap_or_default();
    without.push(&named);
    tests.env("KEIKI_TEST_WITHOUT", without.join(","));
    tests
}

fn installed(subcommand: &str) -> bool {
    cargo([subcommand, "--version"]).output().is_ok_and(|output| output.status.success())
}

fn said(text: &str) -> Command {
    command("echo", [text])
}

fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    command("cargo", args)
}

fn command<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_need_earlier_ones() {
        for (at, stage) in STAGES.iter().enumerate() {
            for need in stage.needs {
                assert!(
                    STAGES[..at].iter().any(|earlier| earlier.name == *need),
                    "{} needs {need}",
                    stage.name
                );
            }
        }
    }

    #[test]
    fn one_of_a_kind_at_a_time() {
        let [unit, template, guests] = ["unit", "template", "guests"].map(|name| Stage::named(name).unwrap());
        assert!(unit.runs_beside(&template) && template.runs_beside(&unit));
        assert!(!unit.runs_beside(&unit) && !unit.runs_beside(&guests) && !guests.runs_beside(&unit));
    }
}
