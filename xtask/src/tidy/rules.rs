//! The rules, as pure functions of a path and a text.

use super::is_cfg_test;
use anyhow::Result;
use std::{fmt, ops::RangeInclusive};
use syn::{
    ItemMod,
    spanned::Spanned,
    visit::{self, Visit},
};

const FILE_LINES: usize = 500;
const FUNCTION_LINES: usize = 70;

/// Texts nobody wrote, and the one that lists what is searched for.
const NOT_OURS: [&str; 4] = ["Cargo.lock", "fuzz/Cargo.lock", "LICENSE", "xtask/src/tidy/rules.rs"];

const LEFTOVERS: [&str; 5] = ["TODO", "FIXME", "XXX:", "unimplemented!(", "todo!("];
/// Written apart, so that this file holds none of what it looks for.
const MACHINE_PATHS: [&str; 3] = [concat!("/wo", "rk/"), concat!("/Us", "ers/"), concat!("/ro", "ot/.")];
const REGISTRY_HOSTS: [&str; 10] = [
    concat!("crates", ".io"),
    concat!("deb", ".debian.org"),
    concat!("docker", ".io"),
    concat!("ghcr", ".io"),
    concat!("proxy", ".golang.org"),
    concat!("pypi", ".org"),
    concat!("python", "hosted.org"),
    concat!("quay", ".io"),
    concat!("registry", ".npmjs.org"),
    concat!("security", ".debian.org"),
];

/// Something a rule does not want.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) rule: &'static str,
    /// What an exception names: `FILE`, or `FILE::FUNCTION`.
    pub(crate) subject: String,
    pub(crate) line: usize,
    pub(crate) what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.subject.split("::").next().unwrap_or(&self.subject);
        write!(f, "{file}:{}: {} [{}]", self.line, self.what, self.rule)
    }
}

/// All rules on one file.
pub(crate) fn check(path: &str, text: &str) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    if !NOT_OURS.contains(&path) {
        words(path, text, "leftover", &LEFTOVERS, &mut findings);
        words(path, text, "machine-path", &MACHINE_PATHS, &mut findings);
        words(path, text, "registry-host", &REGISTRY_HOSTS, &mut findings);
    }
    if path.ends_with(".rs") {
        rust(path, text, &mut findings)?;
    }
    Ok(findings)
}

fn words(path: &str, text: &str, rule: &'static str, words: &[&str], findings: &mut Vec<Finding>) {
    for (number, line) in text.lines().enumerate() {
        for word in words.iter().filter(|word| line.contains(**word)) {
            let what = format!("`{word}` does not belong here");
            findings.push(Finding { rule, subject: path.to_owned(), line: number + 1, what });
        }
    }
}

fn rust(path: &str, text: &str, findings: &mut Vec<Finding>) -> Result<()> {
    let mut scan = Scan::default();
    scan.visit_file(&syn::parse_file(text)?);
    if is_crate_head(path) && !text.starts_with("//!") {
        let what = "a crate opens with a doc comment that says what it is".to_owned();
        findings.push(Finding { rule: "head", subject: path.to_owned(), line: 1, what });
    }
    if let Some(line) =
        scan.modules.iter().find_map(|(name, line)| named_like_its_crate(path, name).then_some(*line))
    {
        let what = "a module has the name of its crate".to_owned();
        findings.push(Finding { rule: "module-name", subject: path.to_owned(), line, what });
    }
    if !path.starts_with("crates/sys/")
        && let Some(&line) = scan.unsafe_lines.first()
    {
        let what = format!("unsafe code ({} places)", scan.unsafe_lines.len());
        findings.push(Finding { rule: "unsafe", subject: path.to_owned(), line, what });
    }
    if is_test(path) {
        return Ok(());
    }
    let lines: Vec<&str> = text.lines().collect();
    let in_tests = |number: usize| scan.tests.iter().any(|range| range.contains(&number));
    let code = |range: RangeInclusive<usize>| {
        range
            .filter(|&number| is_code(lines.get(number - 1).copied().unwrap_or("")) && !in_tests(number))
            .count()
    };
    let count = code(1..=lines.len());
    if count > FILE_LINES {
        let what = format!("{count} lines of code, {FILE_LINES} are allowed");
        findings.push(Finding { rule: "file-length", subject: path.to_owned(), line: 1, what });
    }
    for (name, range) in &scan.functions {
        let count = code(range.clone());
        if count > FUNCTION_LINES {
            let what = format!("function `{name}` has {count} lines of code, {FUNCTION_LINES} are allowed");
            let subject = format!("{path}::{name}");
            findings.push(Finding { rule: "function-length", subject, line: *range.start(), what });
        }
    }
    Ok(())
}

fn is_crate_head(path: &str) -> bool {
    path.ends_with("src/lib.rs") || path.ends_with("src/main.rs")
}

fn named_like_its_crate(path: &str, module: &str) -> bool {
    path.split_once("/src/").is_some_and(|(package, _)| package.rsplit('/').next() == Some(module))
}

fn is_test(path: &str) -> bool {
    path.starts_with("e2e/") || ["/tests/", "/benches/", "/examples/"].iter().any(|dir| path.contains(dir))
}

fn is_code(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with("//")
}

/// What a walk over a file finds, by line numbers that start at 1.
#[derive(Default)]
struct Scan {
    functions: Vec<(String, RangeInclusive<usize>)>,
    modules: Vec<(String, usize)>,
    tests: Vec<RangeInclusive<usize>>,
    unsafe_lines: Vec<usize>,
}

impl Scan {
    fn function(&mut self, signature: &syn::Signature, end: usize) {
        let name = signature.ident.to_string();
        self.functions.push((name, signature.span().start().line..=end));
        self.unsafety(signature.unsafety.as_ref());
    }

    fn unsafety(&mut self, token: Option<&syn::Token![unsafe]>) {
        self.unsafe_lines.extend(token.map(|token| token.span().start().line));
    }
}

impl<'ast> Visit<'ast> for Scan {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        self.modules.push((item.ident.to_string(), item.ident.span().start().line));
        if item.attrs.iter().any(is_cfg_test) {
            self.tests.push(item.span().start().line..=item.span().end().line);
        }
        visit::visit_item_mod(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig, item.block.span().end().line);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, item.block.span().end().line);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.function(&item.sig, block.span().end().line);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_expr_unsafe(&mut self, expr: &'ast syn::ExprUnsafe) {
        self.unsafety(Some(&expr.unsafe_token));
        visit::visit_expr_unsafe(self, expr);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.unsafety(item.unsafety.as_ref());
        visit::visit_item_impl(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        check(path, text).unwrap().into_iter().map(|finding| finding.rule).collect()
    }

    fn lines(count: usize) -> String {
        "    let _ = 1;\n".repeat(count)
    }

    #[test]
    fn long_functions_are_found_by_their_code() {
        let long = |body: usize| format!("fn f() {{\n{}}}\n", lines(body));
        assert_eq!(rules("crates/a/src/x.rs", &long(68)), [""; 0]);
        assert_eq!(rules("crates/a/src/x.rs", &long(69)), ["function-length"]);
        // Comments and blank lines are free, and so are tests.
        let commented = format!("fn f() {{\n{}\n{}}}\n", "    // why\n\n".repeat(40), lines(60));
        assert_eq!(rules("crates/a/src/x.rs", &commented), [""; 0]);
        let in_tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", long(200));
        assert_eq!(rules("crates/a/src/x.rs", &in_tests), [""; 0]);
        assert_eq!(rules("e2e/tests/x.rs", &long(200)), [""; 0]);
        let method = format!("struct S;\nimpl S {{\n{}}}\n", long(90));
        let found = check("crates/a/src/x.rs", &method).unwrap();
        assert_eq!((found[0].subject.as_str(), found[0].line), ("crates/a/src/x.rs::f", 3));
    }

    #[test]
    fn long_files_are_found_by_their_code() {
        let functions = |count: usize| (0..count).map(|n| format!("fn f{n}() {{}}\n")).collect::<String>();
        assert_eq!(rules("crates/a/src/x.rs", &functions(500)), [""; 0]);
        assert_eq!(rules("crates/a/src/x.rs", &functions(501)), ["file-length"]);
        let with_tests = format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", functions(499), functions(99));
        assert_eq!(rules("crates/a/src/x.rs", &with_tests), [""; 0]);
    }

    #[test]
    fn unsafe_code_has_its_places() {
        let text = "fn f() { unsafe { g() } }\n";
        assert_eq!(rules("crates/sys/src/x.rs", text), [""; 0]);
        assert_eq!(rules("crates/node/src/x.rs", text), ["unsafe"]);
        assert_eq!(rules("crates/node/src/x.rs", "unsafe impl Send for S {}\n"), ["unsafe"]);
        assert_eq!(rules("crates/node/src/x.rs", "// unsafe { }\nconst S: &str = \"unsafe {}\";\n"), [""; 0]);
    }

    #[test]
    fn crates_open_with_words() {
        assert_eq!(rules("crates/a/src/lib.rs", "fn f() {}\n"), ["head"]);
        assert_eq!(rules("crates/a/src/lib.rs", "//! What it is.\nfn f() {}\n"), [""; 0]);
        assert_eq!(rules("crates/a/src/x.rs", "fn f() {}\n"), [""; 0]);
    }

    #[test]
    fn no_module_has_its_crates_name() {
        assert_eq!(rules("crates/node/src/lib.rs", "//! Node.\nmod node;\n"), ["module-name"]);
        assert_eq!(rules("crates/cli/src/cmd/mod.rs", "mod node;\n"), [""; 0]);
    }

    #[test]
    fn words_that_do_not_belong() {
        assert_eq!(rules("a.sh", &format!("cd {}x\n", MACHINE_PATHS[0])), ["machine-path"]);
        assert_eq!(rules("a.md", "# TODO\nx FIXME\n"), ["leftover", "leftover"]);
        assert_eq!(rules("a.toml", &format!("url = \"http://{}\"\n", REGISTRY_HOSTS[1])), ["registry-host"]);
        assert_eq!(rules("Cargo.lock", REGISTRY_HOSTS[0]), [""; 0]);
        assert_eq!(rules("a.md", "the node works with todo lists\n"), [""; 0]);
    }
}
