//! The rule `markdown-width`: prose wraps at 100 columns.

use super::rules::Finding;

const COLUMNS: usize = 100;

/// Lines of prose that are too long: not those of tables, headings and code, and targets of links count nothing.
pub(crate) fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut fence = None;
    for (at, line) in text.lines().enumerate() {
        let start = line.trim_start();
        let marks = start.chars().take_while(|mark| *mark == '`').count();
        match fence {
            None if marks >= 3 => fence = Some(marks),
            Some(opened) if marks >= opened && start.trim_end().len() == marks => fence = None,
            None if !start.starts_with(['|', '#']) => {
                let width = width(line);
                if width > COLUMNS {
                    let what = format!("{width} columns, {COLUMNS} are allowed");
                    findings.push(Finding {
                        rule: "markdown-width",
                        subject: path.to_owned(),
                        line: at + 1,
                        what,
                    });
                }
            }
            _ => {}
        }
    }
    findings
}

/// Columns, without what a reader does not see or cannot break: targets of links, and addresses.
fn width(line: &str) -> usize {
    let mut width = 0;
    let mut rest = line;
    while let Some(at) = rest.find("](") {
        width += rest[..at + 1].chars().count();
        rest = rest[at..].find(')').map_or("", |end| &rest[at + end + 1..]);
    }
    let address = |word: &&str| word.contains("://");
    let addresses: usize = rest.split_whitespace().filter(address).map(|word| word.chars().count()).sum();
    width + rest.chars().count() - addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        check("a.md", text).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn long_prose_is_found() {
        assert_eq!(lines(&format!("{}\n{}\n", "ä".repeat(100), "a ".repeat(51))), [2]);
    }

    #[test]
    fn tables_code_headings_and_links_are_free() {
        let long = "word ".repeat(30);
        assert_eq!(lines(&format!("| {long} |\n# {long}\n```text\n{long}\n```\n")), [0; 0]);
        assert_eq!(
            lines(&format!("[here](docs/{}.md) and https://{}\n", "a".repeat(90), "b".repeat(90))),
            [0; 0]
        );
        // A fence is closed only by as many marks, so what follows is looked at.
        assert_eq!(lines(&format!("````\n```\n{long}\n````\n{long}\n")), [5]);
    }
}
