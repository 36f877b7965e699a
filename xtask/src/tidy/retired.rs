//! The rule `retired-word`: what the table "Retired words" of the architecture document lists is no identifier any more.
//!
//! A row is ``| `Old`, `old` | what stands for it now | where |``. Where is empty for the whole tree, or names crates:
//! `node, engine`. Comments, texts and test functions may have the words; names in stored formats and in configuration
//! that must stay are exceptions in `xtask/tidy.allow`: `retired-word FILE::IDENTIFIER # reason`.

use super::rules::Finding;
use anyhow::Result;
use proc_macro2::{TokenStream, TokenTree};
use std::collections::BTreeSet;

const HEADING: &str = "Retired words";

/// A word, and the crates in which it is retired; none means everywhere.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Retired {
    word: String,
    crates: Vec<String>,
}

/// Those that the document lists.
pub(crate) fn listed(document: &str) -> Vec<Retired> {
    let is_heading = |line: &&str| line.starts_with('#');
    let lines = document.lines().skip_while(|line| !(is_heading(line) && line.contains(HEADING))).skip(1);
    let mut retired = Vec::new();
    for line in lines.take_while(|line| !is_heading(line)) {
        let cells: Vec<_> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [words, _, rest @ ..] = &cells[..] else { continue };
        let crates = rest.first().map_or("", |cell| cell).replace('`', "");
        let crates: Vec<_> =
            crates.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
        // What stands between each second mark and the next.
        for word in words.split('`').skip(1).step_by(2) {
            retired.push(Retired { word: word.to_owned(), crates: crates.clone() });
        }
    }
    retired
}

/// Identifiers of one Rust file that are retired there; each is told once.
pub(crate) fn check(path: &str, text: &str, retired: &[Retired]) -> Result<Vec<Finding>> {
    let crate_name = path.split('/').find(|part| *part != "crates").unwrap_or_default();
    let here =
        |entry: &&Retired| entry.crates.is_empty() || entry.crates.iter().any(|name| name == crate_name);
    let words: BTreeSet<&str> = retired.iter().filter(here).map(|entry| entry.word.as_str()).collect();
    let mut findings = Vec::new();
    if !words.is_empty() {
        let tokens = text.parse().map_err(|error| anyhow::anyhow!("{path}: {error}"))?;
        scan(path, tokens, &words, &mut findings);
    }
    Ok(findings)
}

fn scan(path: &str, tokens: TokenStream, words: &BTreeSet<&str>, findings: &mut Vec<Finding>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => scan(path, group.stream(), words, findings),
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                let subject = format!("{path}::{name}");
                if words.contains(name.as_str()) && !findings.iter().any(|known| known.subject == subject) {
                    let what =
                        format!("`{name}` is retired: see \"{HEADING}\" in {}", super::crates::DOCUMENT);
                    findings.push(Finding {
                        rule: "retired-word",
                        subject,
                        line: ident.span().start().line,
                        what,
                    });
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "# A\n| `Before` | no | |\n\n### Retired words\n\n| retired | now | where |\n|---|---|---|\n\
                            | `Seat`, `seat` | `PreparedVm` | |\n| `Place` | `Birth` | node |\n## After\n| `No` | | |\n";

    fn found(path: &str, text: &str) -> Vec<(String, usize)> {
        let findings = check(path, text, &listed(DOCUMENT)).unwrap();
        findings.into_iter().map(|finding| (finding.subject, finding.line)).collect()
    }

    #[test]
    fn the_table_is_read() {
        let words: Vec<_> =
            listed(DOCUMENT).into_iter().map(|entry| (entry.word, entry.crates.len())).collect();
        assert_eq!(words, [("Seat".into(), 0), ("seat".into(), 0), ("Place".into(), 1)]);
    }

    #[test]
    fn identifiers_are_found_wherever_they_are_and_nothing_else() {
        let text = "/// A Seat.\nstruct Seats;\nfn f() {\n    let s = \"Seat\"; // Seat\n    say!(x, seat.y, seat);\n}\n";
        assert_eq!(found("crates/cli/src/a.rs", text), [("crates/cli/src/a.rs::seat".into(), 5)]);
    }

    #[test]
    fn a_word_may_be_retired_in_one_crate() {
        assert_eq!(
            found("crates/node/src/a.rs", "struct Place;"),
            [("crates/node/src/a.rs::Place".into(), 1)]
        );
        assert_eq!(found("crates/vmm/src/a.rs", "struct Place;"), []);
    }
}
