//! What rustc and clippy do not check.
//!
//! | rule | what it wants |
//! |---|---|
//! | `file-length` | a Rust file has at most 500 lines of code, test modules aside |
//! | `function-length` | a function has at most 70 lines of code |
//! | `unsafe` | unsafe code is in `crates/sys`, and where the allow list names a file |
//! | `head` | a crate's first file opens with a doc comment |
//! | `leftover` | no notes to oneself where code should be |
//! | `machine-path` | no path of somebody's machine |
//! | `registry-host` | no address of a package registry: mirrors are the host's business |
//! | `module-name` | no module has the name of its crate |
//! | `import-circle` | no two files of a crate import each other, directly or through others |
//! | `crate-table` | the table of crates in `docs/ARCHITECTURE.md` is the real graph |
//! | `markdown-width` | prose in Markdown wraps at 100 columns |
//! | `retired-word` | no identifier is a word that `docs/ARCHITECTURE.md` lists as retired |
//!
//! Tests, examples and the end to end crate are free of the two length rules. Exceptions are in `xtask/tidy.allow`, one
//! a line with its reason; one that is no longer needed is an error as well, so the list only says what is true.

mod crates;
mod imports;
mod markdown;
mod retired;
mod rules;

use anyhow::{Context, Result, bail, ensure};
use rules::{Finding, check};
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::Path,
    process::{Command, ExitCode},
};

const ALLOW_LIST: &str = "xtask/tidy.allow";

/// Checks every file that git knows or would take.
pub(crate) fn run() -> Result<ExitCode> {
    let root = crate::root()?;
    let list = root.join(ALLOW_LIST);
    let allowed = parse_allow_list(&std::fs::read_to_string(&list).context(ALLOW_LIST)?)?;
    let mut files = BTreeMap::new();
    for path in listed_files(&root)? {
        // Binary files say nothing, and a deleted file may still be listed.
        if let Ok(text) = std::fs::read_to_string(root.join(&path)) {
            files.insert(path, text);
        }
    }
    let findings = all(&root, &files)?;
    let report = judge(&findings, &allowed);
    if report.is_empty() {
        println!("tidy: {} files are as they should be", files.len());
        return Ok(ExitCode::SUCCESS);
    }
    print!("{report}");
    Ok(ExitCode::FAILURE)
}

/// Every rule, on all files.
fn all(root: &Path, files: &BTreeMap<String, String>) -> Result<Vec<Finding>> {
    let architecture = files.get(crates::DOCUMENT).map_or("", String::as_str);
    let retired = retired::listed(architecture);
    let mut findings = crates::check(root, architecture)?;
    for (path, text) in files {
        findings.extend(check(path, text).with_context(|| format!("reading {path}"))?);
        if path.ends_with(".rs") {
            findings.extend(retired::check(path, text, &retired)?);
        }
        if path.ends_with(".md") {
            findings.extend(markdown::check(path, text));
        }
        // Each crate once: at its manifest.
        if let Some(package) = path.strip_suffix("/Cargo.toml") {
            let source = format!("{package}/src");
            let inside = files.iter().filter(|(path, _)| path.ends_with(".rs") && path.starts_with(&source));
            let inside: Vec<_> = inside.map(|(path, text)| (path.as_str(), text.as_str())).collect();
            findings.extend(imports::check(&source, &inside).with_context(|| format!("reading {source}"))?);
        }
    }
    Ok(findings)
}

/// Is what this stands before only built for tests?
fn is_cfg_test(attribute: &syn::Attribute) -> bool {
    attribute.path().is_ident("cfg")
        && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
}

/// An exception: which rule, for which file, and which function in it if the rule is about functions.
#[derive(Debug, PartialEq, Eq)]
struct Allowed {
    rule: String,
    subject: String,
}

/// `RULE SUBJECT # reason`, one a line.
fn parse_allow_list(text: &str) -> Result<Vec<Allowed>> {
    let mut list = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (entry, reason) =
            line.split_once('#').with_context(|| format!("{ALLOW_LIST}: `{line}` has no reason"))?;
        ensure!(!reason.trim().is_empty(), "{ALLOW_LIST}: `{line}` has no reason");
        let [rule, subject] = entry.split_whitespace().collect::<Vec<_>>()[..] else {
            bail!("{ALLOW_LIST}: `{line}` is not RULE SUBJECT # reason");
        };
        list.push(Allowed { rule: rule.to_owned(), subject: subject.to_owned() });
    }
    Ok(list)
}

/// What is wrong, one a line; empty if nothing is.
fn judge(findings: &[Finding], allowed: &[Allowed]) -> String {
    let covers =
        |entry: &Allowed, finding: &Finding| entry.rule == finding.rule && entry.subject == finding.subject;
    let mut report = String::new();
    for finding in findings {
        if !allowed.iter().any(|entry| covers(entry, finding)) {
            let _ = writeln!(report, "{finding}");
        }
    }
    for entry in allowed {
        if !findings.iter().any(|finding| covers(entry, finding)) {
            let _ = writeln!(report, "{ALLOW_LIST}: `{} {}` is no longer needed", entry.rule, entry.subject);
        }
    }
    report
}

fn listed_files(root: &Path) -> Result<Vec<String>> {
    let mut git = Command::new("git");
    // A checkout of another user, as in CI, is read all the same.
    git.args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let output = git.current_dir(root).output().context("running git")?;
    ensure!(output.status.success(), "git: {}", String::from_utf8_lossy(&output.stderr).trim());
    let names = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    Ok(names.split_terminator('\0').map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(subject: &str) -> Finding {
        Finding { rule: "unsafe", subject: subject.to_owned(), line: 3, what: "unsafe code".to_owned() }
    }

    #[test]
    fn exceptions_need_a_reason() {
        let list = parse_allow_list("# head\n\nunsafe crates/guest/src/a.rs # PID 1 needs fork\n").unwrap();
        assert_eq!(list, [Allowed { rule: "unsafe".into(), subject: "crates/guest/src/a.rs".into() }]);
        for bad in ["unsafe a.rs", "unsafe a.rs #", "unsafe # why", "unsafe a b # why"] {
            assert!(parse_allow_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_what_is_listed_is_allowed_and_only_what_is_true_is_listed() {
        let allowed = parse_allow_list("unsafe a.rs # why\n").unwrap();
        assert_eq!(judge(&[finding("a.rs")], &allowed), "");
        assert_eq!(judge(&[finding("a.rs"), finding("b.rs")], &allowed), "b.rs:3: unsafe code [unsafe]\n");
        assert!(judge(&[], &allowed).contains("no longer needed"));
    }
}
