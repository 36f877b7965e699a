//! What a long run writes down, so that it can resume after an interruption.
//!
//! `.keiki/test-all` names the tree under test and has a line for each stage that passed. `.keiki/test-all.last` is the
//! result of the last complete run. Only `KEIKI_TEST_ALL=1` without named stages writes them.

use super::{Outcome, Settings, count::Tally};
use anyhow::{Context, Result, ensure};
use std::{fmt::Write as _, fs, path::PathBuf, process::Command};

/// The state of a run; the default keeps nothing.
#[derive(Debug, Default)]
pub(super) struct State {
    files: Option<Files>,
    tree: String,
    passed: Vec<Outcome>,
}

#[derive(Debug)]
struct Files {
    run: PathBuf,
    last: PathBuf,
    e2e: PathBuf,
}

/// Stages that always run: they are quick, and their effect is outside the tree.
const ALWAYS: [&str; 2] = ["setup", "build"];

impl State {
    pub(super) fn open(settings: &Settings, all_stages: bool) -> Result<Self> {
        if !(settings.long && all_stages) {
            return Ok(Self::default());
        }
        let files = Files {
            run: settings.state("test-all"),
            last: settings.state("test-all.last"),
            e2e: settings.state("e2e.passed"),
        };
        let tree = tree(settings)?;
        let text = fs::read_to_string(&files.run).unwrap_or_default();
        let passed = parse(&text, &tree);
        if passed.is_none() && files.e2e.exists() {
            fs::remove_file(&files.e2e)?;
        }
        let state = Self { files: Some(files), tree, passed: passed.unwrap_or_default() };
        state.write()?;
        Ok(state)
    }

    /// The result of a stage that has passed before.
    pub(super) fn passed(&self, name: &str) -> Option<Outcome> {
        let before = self.passed.iter().find(|outcome| outcome.name == name && !ALWAYS.contains(&name))?;
        Some(Outcome { word: "before".to_owned(), ..before.clone() })
    }

    /// A stage has ended.
    pub(super) fn note(&mut self, outcome: &Outcome) -> Result<()> {
        if outcome.ok() {
            self.passed.retain(|before| before.name != outcome.name);
            self.passed.push(outcome.clone());
        }
        self.write()
    }

    /// Every stage has ended. If all passed, the next run starts from the beginning.
    pub(super) fn finish(&self, outcomes: &[Outcome]) -> Result<()> {
        let Some(files) = &self.files else { return Ok(()) };
        fs::write(&files.last, text(&self.tree, outcomes))?;
        if outcomes.iter().all(Outcome::ok) {
            for file in [&files.run, &files.e2e] {
                if file.exists() {
                    fs::remove_file(file)?;
                }
            }
        }
        Ok(())
    }

    fn write(&self) -> Result<()> {
        let Some(files) = &self.files else { return Ok(()) };
        fs::create_dir_all(files.run.parent().context("no directory")?)?;
        let new = files.run.with_extension("new");
        fs::write(&new, text(&self.tree, &self.passed))?;
        Ok(fs::rename(new, &files.run)?)
    }
}

fn text(tree: &str, outcomes: &[Outcome]) -> String {
    let mut text = format!("{tree}\n");
    let mut sum = Tally::default();
    for Outcome { name, tally, seconds, .. } in outcomes {
        let _ = writeln!(text, "{name} {} passed, {} failed in {seconds} s", tally.passed, tally.failed);
        sum += *tally;
    }
    let _ = writeln!(text, "{} passed, {} failed", sum.passed, sum.failed);
    text
}

/// None if the text is about another tree.
fn parse(text: &str, tree: &str) -> Option<Vec<Outcome>> {
    let mut lines = text.lines();
    if lines.next() != Some(tree) {
        return None;
    }
    let outcome = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, passed, "passed,", failed, "failed", "in", seconds, "s"] = words[..] else { return None };
        let tally = Tally { passed: passed.parse().ok()?, failed: failed.parse().ok()? };
        Some(Outcome { name: name.into(), word: "ok".into(), tally, seconds: seconds.parse().ok()? })
    };
    Some(lines.filter_map(outcome).collect())
}

/// The hash of the working tree, including changes and new files.
fn tree(settings: &Settings) -> Result<String> {
    let index = settings.state("index");
    let git = |args: &[&str]| -> Result<String> {
        let mut git = Command::new("git");
        git.args(["-c", "safe.directory=*"])
            .args(args)
            .current_dir(&settings.root)
            .env("GIT_INDEX_FILE", &index);
        let output = git.output().context("running git")?;
        ensure!(output.status.success(), "git: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };
    git(&["read-tree", "HEAD"])?;
    git(&["add", "--all"])?;
    let tree = git(&["write-tree"])?;
    fs::remove_file(index)?;
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &str, passed: usize) -> Outcome {
        Outcome { name: name.into(), word: "ok".into(), tally: Tally { passed, failed: 0 }, seconds: 7 }
    }

    #[test]
    fn what_passed_is_read_again_for_the_same_tree_only() {
        let outcomes = vec![outcome("unit", 31), outcome("e2e", 2)];
        let text = text("abc", &outcomes);
        assert_eq!(parse(&text, "abc"), Some(outcomes));
        assert_eq!(parse(&text, "abd"), None);
        assert_eq!(parse("", "abc"), None);
        assert!(text.ends_with("\n33 passed, 0 failed\n"));
    }

    #[test]
    fn an_interrupted_run_resumes() {
        let dir = tempfile::tempdir().unwrap();
        let git = |args: &[&str]| {
            let done = Command::new("git")
                .args(["-c", "user.name=a", "-c", "user.email=a@b"])
                .args(args)
                .current_dir(dir.path())
                .output();
            assert!(done.unwrap().status.success(), "{args:?}");
        };
        git(&["init", "-q"]);
        fs::write(dir.path().join(".gitignore"), "/.keiki\n").unwrap();
        fs::create_dir(dir.path().join(".keiki")).unwrap();
        git(&["add", "."]);
        git(&["commit", "-q", "-m", "a"]);
        let settings = Settings { root: dir.path().into(), target: dir.path().into(), long: true };
        let mut first = State::open(&settings, true).unwrap();
        first.note(&outcome("unit", 3)).unwrap();
        first.note(&outcome("setup", 1)).unwrap();
        fs::write(settings.state("e2e.passed"), "a\n").unwrap();
        // Interrupted.
        let second = State::open(&settings, true).unwrap();
        assert_eq!(second.passed("unit").unwrap().tally.passed, 3);
        assert_eq!((second.passed("setup"), second.passed("e2e")), (None, None));
        assert!(settings.state("e2e.passed").exists());
        // A short run neither knows nor disturbs it.
        assert_eq!(State::open(&settings, false).unwrap().passed("unit"), None);
        // Another tree.
        fs::write(dir.path().join("new"), "x").unwrap();
        assert_eq!(State::open(&settings, true).unwrap().passed("unit"), None);
        assert!(!settings.state("e2e.passed").exists());
        // Complete.
        let mut last = State::open(&settings, true).unwrap();
        last.note(&outcome("unit", 5)).unwrap();
        last.finish(&[outcome("unit", 5)]).unwrap();
        assert!(
            fs::read_to_string(settings.state("test-all.last")).unwrap().ends_with("5 passed, 0 failed\n")
        );
        assert_eq!(State::open(&settings, true).unwrap().passed("unit"), None);
    }
}
