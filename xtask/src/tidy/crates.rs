//! The rule `crate-table`: the table of crates in the architecture document is the real graph.

use super::rules::Finding;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Command,
};

/// The document with the table.
pub(crate) const DOCUMENT: &str = "docs/ARCHITECTURE.md";

/// Directories of crates, and the short names of the workspace's crates that each depends on.
type Crates = BTreeMap<String, BTreeSet<String>>;

/// What the table of this document says that is not so.
pub(crate) fn check(root: &Path, document: &str) -> Result<Vec<Finding>> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]);
    let output = cargo.current_dir(root).output().context("running cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let real = real(root, &serde_json::from_slice(&output.stdout)?)?;
    Ok(compare(&real, document))
}

/// What cargo says of the workspace.
fn real(root: &Path, metadata: &Value) -> Result<Crates> {
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let named: BTreeSet<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut crates = Crates::new();
    for package in packages {
        let manifest = Path::new(package["manifest_path"].as_str().context("a package without manifest")?);
        let directory = manifest.parent().and_then(|directory| directory.strip_prefix(root).ok());
        let directory = directory.context("a package outside of the workspace")?.to_string_lossy();
        let depends = package["dependencies"].as_array().into_iter().flatten();
        let depends = depends.filter(|on| on["kind"].is_null()).filter_map(|on| on["name"].as_str());
        let depends = depends.filter(|name| named.contains(name)).map(short).collect();
        crates.insert(directory.into_owned(), depends);
    }
    Ok(crates)
}

fn short(name: &str) -> String {
    name.strip_prefix("keiki-").unwrap_or(name).to_owned()
}

fn compare(real: &Crates, document: &str) -> Vec<Finding> {
    let finding = |line, what| Finding { rule: "crate-table", subject: DOCUMENT.to_owned(), line, what };
    let mut findings = Vec::new();
    let mut missing = real.clone();
    for (at, text) in document.lines().enumerate() {
        let Some((directory, written)) = row(text) else { continue };
        let Some(depends) = missing.remove(&directory) else { continue };
        if written != depends {
            let list = depends.into_iter().collect::<Vec<_>>().join(", ");
            findings.push(finding(at + 1, format!("`{directory}` depends on: {list}")));
        }
    }
    for directory in missing.keys() {
        findings.push(finding(1, format!("`{directory}` is missing in the table of crates")));
    }
    findings
}

/// ``| `DIRECTORY` | what it is | → a, b |``
fn row(line: &str) -> Option<(String, BTreeSet<String>)> {
    let cells: Vec<_> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim).collect();
    let [directory, _, depends] = cells[..] else { return None };
    let directory = directory.strip_prefix('`')?.strip_suffix('`')?;
    let depends = depends.trim_start_matches('→').split(',').map(str::trim).filter(|name| !name.is_empty());
    Some((directory.to_owned(), depends.map(str::to_owned).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn crates() -> Crates {
        let on = |name: &str, kind: Option<&str>| json!({ "name": name, "kind": kind });
        let metadata = json!({ "packages": [
            { "name": "keiki-types", "manifest_path": "/r/crates/types/Cargo.toml", "dependencies": [on("serde", None)] },
            { "name": "keiki-sys", "manifest_path": "/r/crates/sys/Cargo.toml", "dependencies": [] },
            { "name": "keiki-net", "manifest_path": "/r/crates/net/Cargo.toml",
              "dependencies": [on("keiki-types", None), on("keiki-sys", Some("dev"))] },
        ]});
        real(Path::new("/r"), &metadata).unwrap()
    }

    fn found(rows: &str) -> Vec<String> {
        compare(&crates(), rows).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_true_table_is_accepted() {
        let rows = "| crate | is | depends on |\n|---|---|---|\n| `crates/types` | words | |\n| `crates/sys` | Linux | |\n\
                    | `crates/net` | slots | → types |\n| `openapi` | no crate | |\n";
        assert_eq!(found(rows), [""; 0]);
    }

    #[test]
    fn what_is_wrong_and_what_is_missing_is_named() {
        let rows = "| `crates/types` | words | → sys |\n| `crates/net` | slots | → sys, types |\n";
        let wrong = [
            "docs/ARCHITECTURE.md:1: `crates/types` depends on:  [crate-table]",
            "docs/ARCHITECTURE.md:2: `crates/net` depends on: types [crate-table]",
            "docs/ARCHITECTURE.md:1: `crates/sys` is missing in the table of crates [crate-table]",
        ];
        assert_eq!(found(rows), wrong);
    }
}
