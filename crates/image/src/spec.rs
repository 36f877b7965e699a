//! Recipes of root disks and the templates that come with the product.

use crate::error::{Error, Result};
use keiki_types::Shape;
use serde::{Deserialize, Serialize};

/// What a root disk is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootfsSpec {
    /// Of the template; for progress and errors.
    pub name: String,
    /// Distribution release.
    #[serde(default = "default_suite")]
    pub suite: String,
    /// Packages beside the distribution's minimum. Recommended ones are not taken along.
    pub packages: Vec<String>,
    /// Size of the disk. Files not written yet take no space on the host.
    pub disk_mib: u32,
}

/// A template that comes with the product.
#[derive(Debug)]
pub struct TemplateSpec {
    /// What users call it.
    pub name: &'static str,
    /// One sentence.
    pub description: &'static str,
    /// Shape of its machines unless asked otherwise.
    pub shape: Shape,
    packages: &'static [&'static str],
}

/// Release that root disks and guest kernels come from.
pub(crate) const SUITE: &str = "bookworm";

/// Smallest disk that is accepted: the minimal system, a journal, and room to breathe.
const MIN_DISK_MIB: u32 = 512;

/// The template every node has.
pub const BASE: TemplateSpec = TemplateSpec {
    name: "base",
    description: "Debian 12 slim with Python 3, git, CA certificates and process tools",
    shape: Shape { vcpus: 1, memory_mib: 256, disk_mib: 2048 },
    packages: &["python3", "git", "ca-certificates", "netbase", "procps"],
};

static TEMPLATES: [TemplateSpec; 1] = [BASE];

/// The template of this name that comes with the product.
#[must_use]
pub fn template(name: &str) -> Option<&'static TemplateSpec> {
    TEMPLATES.iter().find(|template| template.name == name)
}

/// All templates that come with the product.
#[must_use]
pub fn templates() -> &'static [TemplateSpec] {
    &TEMPLATES
}

impl TemplateSpec {
    /// Recipe of its root disk.
    #[must_use]
    pub fn rootfs(&self) -> RootfsSpec {
        RootfsSpec {
            name: self.name.to_owned(),
            suite: default_suite(),
            packages: self.packages.iter().map(|&package| package.to_owned()).collect(),
            disk_mib: self.shape.disk_mib,
        }
    }
}

impl RootfsSpec {
    /// Everything in it goes to a command line: nothing there may look like an option or a second argument.
    pub(crate) fn check(&self) -> Result<()> {
        let fail = |reason: String| Err(Error::BadSpec { name: self.name.clone(), reason });
        if !is_word(&self.name, "-_.") {
            return fail("the name takes letters, digits, `-`, `_` and `.`".to_owned());
        }
        if !is_word(&self.suite, "-.") {
            return fail(format!("`{}` is no release name", self.suite));
        }
        if let Some(package) = self.packages.iter().find(|package| !is_word(package, "+-.")) {
            return fail(format!("`{package}` is no package name"));
        }
        if self.disk_mib < MIN_DISK_MIB {
            return fail(format!("a disk has at least {MIN_DISK_MIB} MiB"));
        }
        Ok(())
    }
}

fn is_word(text: &str, marks: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || marks.contains(c))
}

fn default_suite() -> String {
    SUITE.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_is_there_and_sound() {
        let base = template("base").unwrap();
        base.rootfs().check().unwrap();
        assert!(template("nope").is_none());
    }

    #[test]
    fn what_could_be_an_option_is_refused() {
        let good = BASE.rootfs();
        for bad in ["--variant=x", "a b", "", "a,b", "a\nb", "git;rm"] {
            let spec = RootfsSpec { packages: vec![bad.to_owned()], ..good.clone() };
            assert!(matches!(spec.check(), Err(Error::BadSpec { .. })), "{bad:?}");
            let spec = RootfsSpec { suite: bad.to_owned(), ..good.clone() };
            assert!(spec.check().is_err(), "{bad:?}");
        }
        assert!(RootfsSpec { disk_mib: 10, ..good }.check().is_err());
    }
}
