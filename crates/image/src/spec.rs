//! Templates as data: the contents of a root disk, and the commands that warm a machine before it
//! is frozen.
//!
//! A template is a TOML file. The built-in ones are `templates/*.toml` of this crate. A node reads
//! others as `NAME.toml` from a configured directory; they take precedence over built-in ones.

use crate::error::{Error, Result, io_error};
use keiki_types::{Shape, TemplateName};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// The recipe of a root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootfsSpec {
    /// The template's name, for progress and errors.
    pub name: String,
    /// Distribution release.
    pub suite: String,
    /// Packages in addition to the minimal system. Recommended packages are not installed.
    pub packages: Vec<String>,
    /// Size of the disk. Unwritten blocks take no space on the host.
    pub disk_mib: u32,
    /// Python packages for the environment at [`crate::VENV`], as pip's requirements.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wheels: Vec<String>,
    /// Environment of every command.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Additional files, by path. A file that begins with `#!` is executable.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, String>,
}

/// A template, before it is built.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateSpec {
    /// Its name.
    #[serde(skip)]
    pub name: String,
    /// A description of one sentence.
    #[serde(default)]
    pub description: String,
    /// Default shape of its machines.
    pub shape: Shape,
    /// Distribution release.
    #[serde(default = "default_suite")]
    pub suite: String,
    /// See [`RootfsSpec::packages`].
    #[serde(default)]
    pub packages: Vec<String>,
    /// See [`RootfsSpec::wheels`]. If all have hashes, nothing else is installed; otherwise pip
    /// resolves them.
    #[serde(default)]
    pub wheels: Vec<String>,
    /// See [`RootfsSpec::env`].
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// See [`RootfsSpec::files`].
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// Shell lines that run in the guest, one after the other, before it is frozen. Each must exit
    /// with 0.
    #[serde(default)]
    pub warm: Vec<String>,
}

/// All templates that a node knows.
#[derive(Debug, Clone)]
pub struct Catalog {
    dir: Option<PathBuf>,
}

/// The release of root disks and guest kernels.
pub(crate) const SUITE: &str = "bookworm";

/// The smallest disk: the minimal system, a journal, and some free space.
const MIN_DISK_MIB: u32 = 512;
/// The largest template file.
const MAX_FILE: u64 = 1 << 20;

/// The built-in templates.
const BUILT_IN: [(&str, &str); 2] = [
    ("base", include_str!("../templates/base.toml")),
    ("code-interpreter", include_str!("../templates/code-interpreter.toml")),
];
/// The template that every node has.
pub const BASE: &str = BUILT_IN[0].0;

impl Catalog {
    /// The built-in templates and those in `dir`, which need not exist.
    #[must_use]
    pub fn new(dir: Option<PathBuf>) -> Self {
        Self { dir }
    }

    /// The template of this name, if it exists. Reads the file now: a change needs no restart.
    ///
    /// # Errors
    /// If its file cannot be read or parsed.
    pub fn get(&self, name: &str) -> Result<Option<TemplateSpec>> {
        // No name may lead out of the directory.
        if name.parse::<TemplateName>().is_err() {
            return Ok(None);
        }
        if let Some(path) = self.dir.as_ref().map(|dir| dir.join(format!("{name}.toml")))
            && let Some(text) = read(&path).map_err(io_error("reading", &path))?
        {
            return TemplateSpec::parse(name, &text).map(Some);
        }
        let built_in = BUILT_IN.iter().find(|(known, _)| *known == name);
        built_in.map(|(name, text)| TemplateSpec::parse(name, text)).transpose()
    }

    /// All names, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = BUILT_IN.iter().map(|(name, _)| (*name).to_owned()).collect();
        for entry in self.dir.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(".toml"));
            names.extend(name.filter(|name| name.parse::<TemplateName>().is_ok()).map(str::to_owned));
        }
        names.sort();
        names.dedup();
        names
    }
}

impl TemplateSpec {
    /// Parses a template.
    ///
    /// # Errors
    /// If it is not a valid template.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let bad = |reason| Error::BadSpec { name: name.to_owned(), reason };
        let spec: Self = toml::from_str(text).map_err(|error| bad(error.to_string().trim().to_owned()))?;
        let spec = Self { name: name.to_owned(), ..spec };
        spec.rootfs().check()?;
        if let Some(line) = spec.warm.iter().find(|line| line.trim().is_empty() || line.contains('\0')) {
            return Err(bad(format!("warm: not a command: `{}`", line.escape_default())));
        }
        Ok(spec)
    }

    /// The recipe of its root disk.
    #[must_use]
    pub fn rootfs(&self) -> RootfsSpec {
        RootfsSpec {
            name: self.name.clone(),
            suite: self.suite.clone(),
            packages: self.packages.clone(),
            disk_mib: self.shape.disk_mib,
            wheels: self.wheels.clone(),
            env: self.env.clone(),
            files: self.files.clone(),
        }
    }
}

impl RootfsSpec {
    /// Everything in a recipe goes to a command line or to a file that other programs parse:
    /// nothing may look like an option or a second argument.
    pub(crate) fn check(&self) -> Result<()> {
        let fail = |reason: String| Err(Error::BadSpec { name: self.name.clone(), reason });
        if !is_word(&self.name, "-_.") {
            return fail("a name consists of letters, digits, `-`, `_` and `.`".to_owned());
        }
        if !is_word(&self.suite, "-.") {
            return fail(format!("suite: not a release name: `{}`", self.suite));
        }
        if let Some(package) = self.packages.iter().find(|package| !is_word(package, "+-.")) {
            return fail(format!("packages: not a package name: `{package}`"));
        }
        if let Some(wheel) = self.wheels.iter().find(|wheel| !is_requirement(wheel)) {
            return fail(format!(
                "wheels: not a Python package: `{wheel}`; write `NAME`, `NAME==VERSION` or `NAME==VERSION --hash=sha256:HEX`"
            ));
        }
        let is_name = |name: &str| is_word(name, "_") && !name.starts_with(|c: char| c.is_ascii_digit());
        if let Some(name) = self.env.keys().find(|name| !is_name(name)) {
            return fail(format!("env: not a variable name: `{name}`"));
        }
        if let Some((name, _)) = self.env.iter().find(|(_, value)| !is_plain(value)) {
            return fail(format!(
                "env: the value of {name} must be one line of printable characters without `\"`, `'`, `\\`, `$` and backquotes"
            ));
        }
        let is_path = |path: &str| {
            path.starts_with('/')
                && !path.ends_with('/')
                && !path.contains('\0')
                && path.split('/').all(|part| part != "..")
        };
        if let Some(path) = self.files.keys().find(|path| !is_path(path)) {
            return fail(format!("files: not an absolute path of a file: `{}`", path.escape_default()));
        }
        if self.disk_mib < MIN_DISK_MIB {
            return fail(format!("a disk needs at least {MIN_DISK_MIB} MiB"));
        }
        Ok(())
    }
}

/// None if there is no such file.
fn read(path: &Path) -> io::Result<Option<String>> {
    let file = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text).map(|_| Some(text))
}

fn is_word(text: &str, marks: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric() || marks.contains('_') && c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || marks.contains(c))
}

/// `NAME[EXTRA]==VERSION`, other comparisons, and hashes.
fn is_requirement(text: &str) -> bool {
    let mut words = text.split(' ');
    let package = words.next().unwrap_or_default();
    let is_hash = |word: &str| {
        let hex = word.strip_prefix("--hash=sha256:").unwrap_or_default();
        hex.len() == 64 && hex.chars().all(|c| c.is_ascii_hexdigit())
    };
    is_word(package, "-_.[],<>=!~*+") && words.all(is_hash)
}

/// Text that means the same in `/etc/environment` and between double quotes in a shell.
fn is_plain(text: &str) -> bool {
    text.chars().all(|c| !c.is_control() && !"\"'\\$`".contains(c))
}

fn default_suite() -> String {
    SUITE.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> RootfsSpec {
        Catalog::new(None).get(BASE).unwrap().unwrap().rootfs()
    }

    #[test]
    fn what_comes_with_the_product_is_sound() {
        let catalog = Catalog::new(None);
        assert_eq!(catalog.names(), BUILT_IN.map(|(name, _)| name));
        for name in catalog.names() {
            let spec = catalog.get(&name).unwrap().unwrap();
            assert!(!spec.description.is_empty() && spec.name == name);
            assert!(
                spec.wheels.iter().all(|wheel| wheel.contains(" --hash=")),
                "{name}: a wheel is not pinned"
            );
        }
        assert_eq!(catalog.get("nope").unwrap(), None);
    }

    #[test]
    fn a_users_own_are_files_and_go_first() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let catalog = Catalog::new(Some(dir.path().join("none")));
        assert_eq!(catalog.names().len(), BUILT_IN.len());
        let catalog = Catalog::new(Some(dir.path().to_owned()));
        let text = "shape = { vcpus = 2, memory_mib = 512, disk_mib = 1024 }\npackages = [\"ruby\"]\n";
        write("mine.toml", text);
        write("base.toml", text);
        write("Not a name.toml", text);
        write("broken.toml", "shape = 3");
        assert_eq!(catalog.names(), ["base", "broken", "code-interpreter", "mine"]);
        for name in ["mine", "base"] {
            let spec = catalog.get(name).unwrap().unwrap();
            assert_eq!((spec.packages, spec.shape.vcpus), (vec!["ruby".to_owned()], 2), "{name}");
        }
        let refusal = catalog.get("broken").unwrap_err().to_string();
        assert!(refusal.contains("broken") && refusal.contains("shape"), "{refusal}");
        assert_eq!(catalog.get("../etc/x").unwrap(), None);
    }

    #[test]
    fn what_could_be_an_option_is_refused() {
        let good = base();
        good.check().unwrap();
        for bad in ["--variant=x", "a b", "", "a,b", "a\nb", "git;rm"] {
            let spec = RootfsSpec { packages: vec![bad.to_owned()], ..good.clone() };
            assert!(matches!(spec.check(), Err(Error::BadSpec { .. })), "{bad:?}");
            let spec = RootfsSpec { suite: bad.to_owned(), ..good.clone() };
            assert!(spec.check().is_err(), "{bad:?}");
        }
        for bad in ["-r x", "numpy --index-url=x", "a\nb", "", "./here", "x @ file", "numpy --hash=sha256:12"]
        {
            let spec = RootfsSpec { wheels: vec![bad.to_owned()], ..good.clone() };
            assert!(spec.check().is_err(), "{bad:?}");
        }
        for bad in ["a\nB=2", "$(x)", "\"", "`x`"] {
            let spec = RootfsSpec { env: [("A".to_owned(), bad.to_owned())].into(), ..good.clone() };
            assert!(spec.check().is_err(), "{bad:?}");
        }
        for bad in ["", "A=B", "1A", "A B"] {
            let spec = RootfsSpec { env: [(bad.to_owned(), "x".to_owned())].into(), ..good.clone() };
            assert!(spec.check().is_err(), "{bad:?}");
        }
        for bad in ["", "here", "/a/../b", "/a/", "/a\0"] {
            let spec = RootfsSpec { files: [(bad.to_owned(), "x".to_owned())].into(), ..good.clone() };
            assert!(spec.check().is_err(), "{bad:?}");
        }
        assert!(RootfsSpec { disk_mib: 10, ..good }.check().is_err());
    }

    #[test]
    fn requirements_as_pip_has_them() {
        let hash = format!("numpy==2.0 --hash=sha256:{}", "ab".repeat(32));
        for good in ["numpy", "numpy==2.0.1", "requests[socks]>=2,<3", &hash] {
            assert!(is_requirement(good), "{good}");
        }
    }
}
