//! The kernel modules that a guest loads, and their order.
//!
//! Distribution kernels have most drivers as modules and some built in, which differs between
//! kernels. This lists the modules that a guest wants; `modules.dep` has their dependencies,
//! `modules.builtin` those that are built in.

use crate::{
    error::{Result, io_error},
    tool::Tool,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The modules that every guest wants, most important first. True if no guest works without it.
pub(crate) const WANTED: &[(&str, bool)] = &[
    ("virtio_mmio", true),
    ("virtio_blk", true),
    ("ext4", true),
    ("virtio_console", true),
    ("virtio_net", true),
    ("virtio_rng", true),
    // Returns free pages to the host.
    ("virtio_balloon", false),
    ("af_packet", false),
    ("vmgenid", false),
    ("overlay", false),
    ("fuse", false),
    ("tun", false),
];

/// The modules of one kernel, read from its index files.
#[derive(Debug)]
pub struct Index {
    /// Module name to path and dependencies, nearest first, as in `modules.dep`.
    loadable: BTreeMap<String, (String, Vec<String>)>,
    builtin: BTreeSet<String>,
}

impl Index {
    /// Parses `modules.dep` and `modules.builtin`.
    #[must_use]
    pub fn parse(dep: &str, builtin: &str) -> Self {
        let loadable = dep.lines().filter_map(|line| {
            let (path, needs) = line.split_once(':')?;
            let needs = needs.split_whitespace().map(str::to_owned).collect();
            Some((module_name(path), (path.to_owned(), needs)))
        });
        let loadable = loadable.collect();
        Self { loadable, builtin: builtin.lines().map(module_name).collect() }
    }

    /// Whether this module is built into the kernel.
    #[must_use]
    pub fn is_builtin(&self, name: &str) -> bool {
        self.builtin.contains(name)
    }

    /// Paths of `wanted` and their dependencies, each once and after its own dependencies. Built-in
    /// modules have no path.
    ///
    /// # Errors
    /// The name of a required module that this kernel lacks.
    pub fn order(&self, wanted: &[(&str, bool)]) -> Result<Vec<String>, String> {
        let mut order: Vec<String> = Vec::new();
        for &(name, required) in wanted {
            match self.loadable.get(name) {
                // The file has the transitive closure, the farthest dependency last.
                Some((path, needs)) => {
                    for path in needs.iter().rev().chain([path]) {
                        if !order.contains(path) {
                            order.push(path.clone());
                        }
                    }
                }
                None if required && !self.is_builtin(name) => return Err(name.to_owned()),
                None => {}
            }
        }
        Ok(order)
    }
}

/// Reads a module file and decompresses it.
///
/// # Errors
/// If it cannot be read, or the program that decompresses it is missing.
pub fn unpack(module: &Path) -> Result<Vec<u8>> {
    let action = || format!("unpacking {}", module.display());
    match module.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => Tool::new("xz", action()).args(["-dc".as_ref(), module.as_os_str()]).output(),
        Some("zst") => Tool::new("zstd", action()).args(["-dcq".as_ref(), module.as_os_str()]).output(),
        _ => fs::read(module).map_err(io_error("reading", module)),
    }
}

/// `kernel/drivers/x/virtio-rng.ko.xz` is the module `virtio_rng`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

/// The file name of a decompressed module.
pub(crate) fn unpacked_name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    [".xz", ".zst", ".gz"].iter().find_map(|suffix| file.strip_suffix(suffix)).unwrap_or(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lines of the index of a Debian cloud kernel 6.12.
    const DEP: &str = include_str!("../tests/data/modules.dep");
    const BUILTIN: &str = include_str!("../tests/data/modules.builtin");

    #[test]
    fn needs_come_first_and_built_in_ones_are_left_out() {
        let order = Index::parse(DEP, BUILTIN).order(WANTED).unwrap();
        let at = |name: &str| order.iter().position(|path| module_name(path) == name);
        assert!(at("failover").unwrap() < at("net_failover").unwrap());
        assert!(at("net_failover").unwrap() < at("virtio_net").unwrap());
        assert!(at("virtio_rng").is_some() && at("virtio_mmio").is_some());
        assert_eq!((at("ext4"), at("virtio_console")), (None, None));
    }

    #[test]
    fn every_module_of_a_real_index_comes_after_its_needs() {
        let index = Index::parse(DEP, BUILTIN);
        let all: Vec<(&str, bool)> = index.loadable.keys().map(|name| (name.as_str(), true)).collect();
        let order = index.order(&all).unwrap();
        assert_eq!(order.len(), all.len(), "each once");
        let at = |wanted: &str| order.iter().position(|path| path == wanted).unwrap();
        for (path, needs) in index.loadable.values() {
            for need in needs {
                assert!(at(need) < at(path), "{need} before {path}");
            }
        }
    }

    #[test]
    fn a_missing_required_module_is_named() {
        let index = Index::parse("", "kernel/fs/ext4/ext4.ko\n");
        assert_eq!(index.order(&[("ext4", true), ("overlay", false)]), Ok(vec![]));
        assert_eq!(index.order(&[("virtio_blk", true)]), Err("virtio_blk".to_owned()));
    }

    #[test]
    fn names() {
        assert_eq!(module_name("kernel/drivers/char/hw_random/virtio-rng.ko.xz"), "virtio_rng");
        assert_eq!(unpacked_name("kernel/a/virtio-rng.ko.xz"), "virtio-rng.ko");
        assert_eq!(unpacked_name("a.ko"), "a.ko");
    }
}
