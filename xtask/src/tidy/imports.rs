//! The rule `import-circle`: no two files of a crate import each other, directly or through others.
//!
//! A file imports another when it names something of it: `use crate::a::B`, `super::b()`, `child::C`. A name that its
//! module only passes on (`pub use a::B`) counts as an import of the file that defines it; passing on the names of a
//! child, and declaring one (`mod a;`), count as no import, nor does what a file takes from the module it is a part of:
//! a module and its parts are one piece. Test modules are left out.

use super::{is_cfg_test, rules::Finding};
use anyhow::Result;
use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use syn::{
    UseTree, Visibility,
    visit::{self, Visit},
};

/// How often a name may be passed on before it is looked for no further.
const HOPS: usize = 8;

/// The circles of a crate, of which these are the source files: its directory, and path and text of each.
pub(crate) fn check(source: &str, files: &[(&str, &str)]) -> Result<Vec<Finding>> {
    let graph = Crate::read(source, files)?.graph();
    let circles = circles(&graph);
    Ok(circles.iter().map(|circle| finding(source, &graph, circle)).collect())
}

/// Which files a file imports, and by which name.
type Graph = BTreeMap<String, BTreeMap<String, String>>;

type ModulePath = Vec<String>;

/// The modules of a crate, by their paths; the root's is empty.
#[derive(Default)]
struct Crate {
    modules: BTreeMap<ModulePath, Module>,
}

#[derive(Default)]
struct Module {
    file: String,
    /// Names that come from elsewhere, and from where. Modules inside see them too, so private ones count.
    passed_on: BTreeMap<String, Vec<String>>,
    /// Paths that are named here, as written.
    named: Vec<Vec<String>>,
}

impl Crate {
    fn read(source: &str, files: &[(&str, &str)]) -> Result<Self> {
        let has_library = files.iter().any(|(path, _)| *path == format!("{source}/lib.rs"));
        let mut tree = Self::default();
        let mut tests = Vec::new();
        for (path, text) in files {
            let Some(module) = module_path(source, path, has_library) else { continue };
            let mut scan =
                Scan { at: module, file: (*path).to_owned(), modules: Vec::new(), tests: &mut tests };
            scan.enter(&syn::parse_file(text)?.items);
            tree.modules.extend(scan.modules);
        }
        tree.modules.retain(|path, _| !tests.iter().any(|test| path.starts_with(test)));
        Ok(tree)
    }

    fn graph(&self) -> Graph {
        let mut graph = Graph::new();
        for (at, module) in &self.modules {
            let imports = graph.entry(module.file.clone()).or_default();
            for path in &module.named {
                let Some((file, name)) = self.resolve(at, path, HOPS) else { continue };
                let is_parent =
                    (0..=at.len()).any(|n| self.modules.get(&at[..n]).is_some_and(|m| m.file == file));
                if !is_parent {
                    imports.entry(file).or_insert(name);
                }
            }
        }
        graph
    }

    /// The file that defines what this path names where `at` says it, and the name it has there.
    fn resolve(&self, at: &[String], path: &[String], hops: usize) -> Option<(String, String)> {
        let module = &self.modules[at];
        if let (Some(target), true) = (path.first().and_then(|first| module.passed_on.get(first)), hops > 0) {
            let target: Vec<_> = target.iter().chain(&path[1..]).cloned().collect();
            return self.resolve(at, &target, hops - 1);
        }
        let absolute = self.absolute(at, path)?;
        let length = (0..=absolute.len()).rev().find(|n| self.modules.contains_key(&absolute[..*n]))?;
        let (place, rest) = absolute.split_at(length);
        let module = &self.modules[place];
        let Some(name) = rest.first() else {
            return Some((module.file.clone(), place.last().map_or("crate".to_owned(), Clone::clone)));
        };
        if module.passed_on.contains_key(name) && hops > 0 {
            return self.resolve(place, rest, hops - 1);
        }
        Some((module.file.clone(), name.clone()))
    }

    /// From the crate's root; none for a path that leads out of the crate.
    fn absolute(&self, at: &[String], path: &[String]) -> Option<ModulePath> {
        let mut place: ModulePath = at.to_vec();
        let mut rest = path.iter().peekable();
        match rest.peek()?.as_str() {
            "crate" => {
                place.clear();
                rest.next();
            }
            "self" => drop(rest.next()),
            "super" => {}
            first => {
                place.push(first.to_owned());
                if !self.modules.contains_key(&place) {
                    return None;
                }
                rest.next();
            }
        }
        while rest.next_if(|segment| *segment == "super").is_some() {
            place.pop()?;
        }
        place.extend(rest.cloned());
        Some(place)
    }
}

/// The module whose file this is; none for programs beside the library and for `src/bin`.
fn module_path(source: &str, path: &str, has_library: bool) -> Option<ModulePath> {
    let inner = path.strip_prefix(source)?.strip_prefix('/')?.strip_suffix(".rs")?;
    let mut parts: ModulePath = inner.split('/').map(str::to_owned).collect();
    match parts.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["lib"] => return Some(Vec::new()),
        ["main"] => return (!has_library).then(Vec::new),
        ["bin", ..] => return None,
        _ => {}
    }
    if parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    Some(parts)
}

/// A walk over one file and the modules written in it.
struct Scan<'a> {
    at: ModulePath,
    file: String,
    modules: Vec<(ModulePath, Module)>,
    tests: &'a mut Vec<ModulePath>,
}

impl Scan<'_> {
    fn enter(&mut self, items: &[syn::Item]) {
        self.modules.push((self.at.clone(), Module { file: self.file.clone(), ..Module::default() }));
        let own = self.modules.len() - 1;
        for item in items {
            let syn::Item::Mod(item) = item else {
                let mut names = Names { module: &mut self.modules[own].1 };
                names.visit_item(item);
                continue;
            };
            self.at.push(item.ident.to_string());
            if item.attrs.iter().any(is_cfg_test) {
                self.tests.push(self.at.clone());
            } else if let Some((_, items)) = &item.content {
                self.enter(items);
            }
            self.at.pop();
        }
    }
}

/// The paths that the items of a module name.
struct Names<'a> {
    module: &'a mut Module,
}

impl Names<'_> {
    fn used(&mut self, tree: &UseTree, before: &[String], passes_on: bool) {
        let with = |ident: &syn::Ident| [before, &[ident.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.used(&path.tree, &with(&path.ident), passes_on),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.used(tree, before, passes_on)),
            UseTree::Name(name) => self.leaf(with(&name.ident), &name.ident, before, passes_on),
            UseTree::Rename(name) => self.leaf(with(&name.ident), &name.rename, before, passes_on),
            UseTree::Glob(_) => self.module.named.push(before.to_vec()),
        }
    }

    fn leaf(&mut self, path: Vec<String>, name: &syn::Ident, before: &[String], passes_on: bool) {
        // `use a::{self}` is `a`.
        let own = path.last().is_some_and(|last| last == "self");
        let path = if own { before.to_vec() } else { path };
        let name = if own { before.last().cloned().unwrap_or_default() } else { name.to_string() };
        self.module.passed_on.insert(name, path.clone());
        if !passes_on {
            self.module.named.push(path);
        }
    }

    /// Paths in what a macro is given, which is no syntax yet.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.end(&mut path);
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.end(&mut path);
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.end(&mut path);
    }

    fn end(&mut self, path: &mut Vec<String>) {
        let path = std::mem::take(path);
        if path.len() > 1 {
            self.module.named.push(path);
        }
    }
}

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let passes_on = !matches!(item.vis, Visibility::Inherited);
        self.used(&item.tree, &[], passes_on);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            let path = path.segments.iter().map(|segment| segment.ident.to_string());
            self.module.named.push(path.collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }

    // `pub(super)` names nothing.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// The files that can be reached from themselves, in groups that reach each other.
fn circles(graph: &Graph) -> Vec<BTreeSet<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|file| (file.as_str(), reached(graph, file))).collect();
    let mut circles = Vec::new();
    let mut known = BTreeSet::new();
    for (file, others) in &reached {
        if others.contains(file) && !known.contains(file) {
            let circle: BTreeSet<&str> =
                others.iter().copied().filter(|other| reached[other].contains(file)).collect();
            known.extend(circle.iter().copied());
            circles.push(circle);
        }
    }
    circles
}

fn reached<'a>(graph: &'a Graph, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&str> = graph[from].keys().map(String::as_str).collect();
    while let Some(file) = next.pop() {
        if reached.insert(file) {
            next.extend(graph[file].keys().map(String::as_str));
        }
    }
    reached
}

/// The whole circle, as the shortest way from its first file around to itself.
fn finding(source: &str, graph: &Graph, circle: &BTreeSet<&str>) -> Finding {
    let first = circle.first().copied().unwrap_or_default();
    let next = |file: &str| graph[file].keys().map(String::as_str).filter(|next| circle.contains(next));
    let mut seen = BTreeSet::new();
    let mut ways = VecDeque::from([vec![first]]);
    let mut around = Vec::new();
    while let Some(way) = ways.pop_front() {
        if way.len() > 1 && way.last() == Some(&first) {
            around = way;
            break;
        }
        for next in way.last().into_iter().flat_map(|last| next(last)) {
            if seen.insert(next) {
                ways.push_back([&way[..], &[next]].concat());
            }
        }
    }
    let short = |file: &str| file.strip_prefix(source).unwrap_or(file).trim_start_matches('/').to_owned();
    let steps = around.windows(2).map(|pair| format!(" -> {} ({})", short(pair[1]), graph[pair[0]][pair[1]]));
    let what =
        format!("{} files import each other: {}{}", circle.len(), short(first), steps.collect::<String>());
    Finding { rule: "import-circle", subject: source.trim_end_matches("/src").to_owned(), line: 1, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let paths: Vec<String> = files.iter().map(|(path, _)| format!("c/src/{path}")).collect();
        let files: Vec<_> = paths.iter().zip(files).map(|(path, (_, text))| (path.as_str(), *text)).collect();
        check("c/src", &files).unwrap().into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn two_files_that_import_each_other() {
        let files = [
            ("lib.rs", "mod a;\nmod b;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "fn f(_: &super::a::A) {}"),
        ];
        assert_eq!(found(&files), ["2 files import each other: a.rs -> b.rs (B) -> a.rs (A)"]);
    }

    #[test]
    fn a_long_circle_and_one_that_hides_in_a_macro() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;"),
            ("a.rs", "use crate::b;"),
            ("b/mod.rs", "use super::c::{self, C};"),
            ("c.rs", "fn f() { say!(\"{}\", crate::a::NAME) }"),
        ];
        assert_eq!(
            found(&files),
            ["3 files import each other: a.rs -> b/mod.rs (b) -> c.rs (c) -> a.rs (NAME)"]
        );
    }

    #[test]
    fn names_that_are_passed_on_are_of_the_file_that_defines_them() {
        // `x` wants `A` through the root, which uses `x`: no circle, as `A` is of `a`.
        let files = [
            ("lib.rs", "mod a;\nmod x;\npub use a::A;\nfn f() { x::g() }"),
            ("a.rs", "struct A;"),
            ("x.rs", "use crate::A;"),
        ];
        assert_eq!(found(&files), [""; 0]);
        // A name of another crate is of no file here.
        let files = [("lib.rs", "mod x;\nuse other::O;\nuse x::X;"), ("x.rs", "use super::O;")];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn modules_are_named_by_what_they_were_imported_as() {
        let files = [
            ("main.rs", "mod a;\nmod m;"),
            ("a.rs", "use crate::m as other;\nfn f() { other::n::g() }"),
            ("m/mod.rs", "pub mod n;"),
            ("m/n.rs", "use crate::a;"),
        ];
        assert_eq!(found(&files), ["2 files import each other: a.rs -> m/n.rs (g) -> a.rs (a)"]);
    }

    #[test]
    fn a_module_and_its_parts_are_one_piece() {
        let files = [
            ("main.rs", "mod m;"),
            ("m/mod.rs", "mod n;\npub struct M;\nfn f() { n::g() }"),
            ("m/n.rs", "use super::M;\nuse crate::run;"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn what_is_no_import() {
        let files = [
            // Declared, passed on, and only seen by a parent.
            ("lib.rs", "mod a;\npub use a::A;\npub struct L;"),
            (
                "a.rs",
                "use crate::L;\npub(in crate::a) struct A;\n#[cfg(test)]\nmod tests { use crate::b::B; }",
            ),
            // Tests, here and in a file of their own.
            ("b/mod.rs", "use crate::a::A;\n#[cfg(test)]\nmod tests;"),
            ("b/tests.rs", "use super::*;"),
            // Programs beside the library.
            ("main.rs", "use crate::a::A;"),
            ("bin/other.rs", "use crate::a::A;"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }
}
