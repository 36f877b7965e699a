//! Chooses tests in ways that the harness does not offer: by parts, and to resume an interrupted run.

use crate::{Test, tests};
use anyhow::{Context, Result};
use std::{collections::BTreeSet, fs::OpenOptions, io::Write, path::PathBuf};

/// The tests of this run. Those that run alone come last.
pub fn chosen() -> Result<Vec<(String, Test)>> {
    let passed = before()?;
    let only = std::env::var("KEIKI_E2E_ONLY").unwrap_or_default();
    let only: Vec<&str> = only.split_whitespace().collect();
    let mut tests: Vec<_> =
        tests::all().into_iter().map(|(name, test)| (tests::full_name(name), test)).collect();
    if let Ok(part) = std::env::var("KEIKI_E2E_PART") {
        tests = share(&part, tests)?;
    }
    tests.retain(|(name, _)| only.is_empty() || only.iter().any(|word| name.contains(word)));
    tests.retain(|(name, _)| !passed.contains(name) && tests::is_allowed(name));
    tests.sort_by_key(|(name, _)| tests::is_alone(name));
    if !passed.is_empty() {
        println!("{} have passed before", passed.len());
    }
    Ok(tests)
}

/// Records that a test has passed. Syncs at once: the machine may end at any time.
pub fn passed(name: &str) -> Result<()> {
    let Some(path) = file() else { return Ok(()) };
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    writeln!(file, "{name}")?;
    Ok(file.sync_all()?)
}

fn file() -> Option<PathBuf> {
    std::env::var_os("KEIKI_E2E_PASSED").map(PathBuf::from)
}

fn before() -> Result<BTreeSet<String>> {
    match file() {
        Some(file) if file.exists() => {
            Ok(std::fs::read_to_string(file)?.lines().map(str::to_owned).collect())
        }
        _ => Ok(BTreeSet::new()),
    }
}

/// The Kth of N parts. Keeps the tests of a module together, because they often share a template.
fn share(part: &str, all: Vec<(String, Test)>) -> Result<Vec<(String, Test)>> {
    let numbers = part.split_once('/').and_then(|(at, of)| Some((at.parse().ok()?, of.parse().ok()?)));
    let (at, of): (usize, usize) = numbers
        .filter(|(at, of)| (1..=*of).contains(at))
        .with_context(|| format!("KEIKI_E2E_PART is `{part}`: write K/N, K from 1 to N"))?;
    let mut groups: Vec<String> = Vec::new();
    let mine = all.into_iter().filter(|(name, _)| {
        let group = tests::group(name);
        let place = groups.iter().position(|known| known == group).unwrap_or_else(|| {
            groups.push(group.to_owned());
            groups.len() - 1
        });
        place % of == at - 1
    });
    Ok(mine.collect())
}
