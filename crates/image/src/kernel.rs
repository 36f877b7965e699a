//! The guest kernel: a distribution's kernel, unpacked from its package.

use crate::{
    Builder,
    apt::{Apt, Package, host_mirror},
    cache,
    error::{Error, Result, io_error},
    spec::SUITE,
    tool::Tool,
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Depends on the newest kernel of its suite. The cloud flavour: small, with virtio, without
/// hardware drivers.
const METAPACKAGE: &str = "linux-image-cloud-amd64";

/// A guest kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The kernel in the format for boot loaders.
    pub bzimage: PathBuf,
    /// Its modules and their index (`lib/modules/RELEASE` of the package).
    pub modules_dir: PathBuf,
    /// The output of `uname -r` in the guest.
    pub release: String,
}

pub(crate) fn build(builder: &Builder) -> Result<Kernel> {
    let suite = format!("{SUITE}-backports");
    let part = builder.cache.part("kernel", &cache::key(&["kernel", METAPACKAGE, &suite]));
    if !builder.refresh && part.is_dir() {
        return open(&part);
    }
    builder.say("kernel: looking for the newest package");
    let apt = Apt::open(builder, &host_mirror()?, &suite)?;
    let package = resolve(&apt)?;
    let what =
        format!("kernel: downloading {} {} ({} MiB)", package.name, package.version, package.size >> 20);
    builder.say(&what);
    let downloads = builder.cache.dir("downloads")?;
    let deb = apt.download(&package, &downloads, |percent| builder.say(format!("{what}: {percent} %")))?;

    builder.say("kernel: unpacking");
    let tree = builder.cache.scratch("kernel")?;
    Tool::new("dpkg-deb", "unpacking the kernel package")
        .dir(&downloads)
        .args(["-x".as_ref(), deb.as_os_str(), tree.as_os_str()])
        .output()?;
    arrange(&tree)?;
    builder.cache.publish(&tree, &part)?;
    cache::remove(&deb)?;
    open(&part)
}

/// The package with the kernel. Some suites only have an unsigned one, which is fine for a guest.
fn resolve(apt: &Apt) -> Result<Package> {
    let meta = apt.show(METAPACKAGE)?;
    let image = meta.depends.iter().find(|name| name.starts_with("linux-image-"));
    let image =
        image.ok_or_else(|| Error::BadKernel(format!("{METAPACKAGE} does not depend on a kernel")))?;
    match apt.show(image) {
        Err(Error::ToolFailed { .. }) => apt.show(&format!("{image}-unsigned")),
        found => found,
    }
}

/// Reduces an unpacked package to the kernel, its modules and their index.
fn arrange(tree: &Path) -> Result<()> {
    let modules = tree.join("lib/modules");
    let merged = tree.join("usr/lib/modules");
    if merged.is_dir() {
        fs::create_dir_all(tree.join("lib")).map_err(io_error("creating", tree))?;
        fs::rename(&merged, &modules).map_err(io_error("moving", &merged))?;
    }
    let release = only_release(&modules)?;
    let image = tree.join("boot").join(format!("vmlinuz-{release}"));
    fs::rename(&image, tree.join("vmlinuz")).map_err(io_error("moving", &image))?;
    Tool::new("depmod", "indexing the kernel's modules")
        .args(["-b".as_ref(), tree.as_os_str(), release.as_ref()])
        .output()?;
    cache::remove(&tree.join("boot"))?;
    cache::remove(&tree.join("usr"))
}

fn open(part: &Path) -> Result<Kernel> {
    let modules = part.join("lib/modules");
    let release = only_release(&modules)?;
    Ok(Kernel { bzimage: part.join("vmlinuz"), modules_dir: modules.join(&release), release })
}

fn only_release(modules: &Path) -> Result<String> {
    let mut names = fs::read_dir(modules)
        .map_err(io_error("listing", modules))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    match (names.next(), names.next()) {
        (Some(release), None) => Ok(release),
        _ => Err(Error::BadKernel(format!(
            "{} does not contain the modules of exactly one kernel",
            modules.display()
        ))),
    }
}
