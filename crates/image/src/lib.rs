//! Builds kernel, initramfs and root disks from distribution packages. Runs no machine.
//!
//! ```text
//!   package mirror ──apt──> kernel package ──unpack──> Kernel { bzImage, modules }
//!                                                         │
//!   keiki-guest ──────────────────────────────> initramfs ┤ (cpio: /init + the modules it loads)
//!                                                         │
//!   package mirror ──mmdebstrap──> tree ──mkfs──> Rootfs ─┴──> Template { files, digest }
//!   Python index ────pip wheels─────^
//! ```
//!
//! Everything is in one cache directory, where every finished part appears by a rename. An
//! interrupted build leaves only `tmp/`, which the next builder empties before it continues with
//! the parts that are not finished. The name of a part is derived from its recipe, so a changed
//! recipe never finds an old part. One builder works at a time; others wait for the lock.
//!
//! The host is not changed: packages come through a separate apt configuration (sources, lists and
//! archives in the cache) and are unpacked, not installed; nothing is mounted. The mirror is the
//! one that the host uses.
//!
//! Calls block, some for a minute.

mod apt;
mod cache;
pub mod cpio;
mod error;
mod generation;
mod initramfs;
mod kernel;
pub mod modules;
mod rootfs;
mod spec;
mod tool;
mod wheels;

pub use error::{Error, Result};
pub use kernel::Kernel;
pub use rootfs::Rootfs;
pub use spec::{BASE, Catalog, RootfsSpec, TemplateSpec};
pub use wheels::VENV;

use cache::Cache;
use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Part of every digest. Raise it when the same recipe gives other bytes than before.
const BUILDER_VERSION: u32 = 1;

/// Receives lines of progress, for people.
pub type Progress = Arc<dyn Fn(&str) + Send + Sync>;

/// Builds kernels, initramfs images and root disks in a cache directory.
#[derive(Clone)]
pub struct Builder {
    cache: Cache,
    progress: Progress,
    refresh: bool,
}

/// Everything that a first boot reads, and its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// The kernel and its modules.
    pub kernel: Kernel,
    /// The initial RAM file system with the guest agent as `/init`.
    pub initramfs: PathBuf,
    /// The root disk.
    pub rootfs: Rootfs,
    /// Digest of the recipe, all package versions, the kernel, the guest agent and the builder.
    pub digest: String,
}

impl Builder {
    /// A builder that keeps finished parts in `cache` and reports its progress line by line.
    pub fn new(cache: impl Into<PathBuf>, progress: Progress) -> Self {
        Self { cache: Cache::new(cache.into()), progress, refresh: false }
    }

    /// Rebuilds finished parts, to get newer packages.
    #[must_use]
    pub fn refresh(mut self, yes: bool) -> Self {
        self.refresh = yes;
        self
    }

    /// Removes leftovers of interrupted builds from the cache, unless a build is under way.
    ///
    /// # Errors
    /// If they cannot be removed.
    pub fn tidy(&self) -> Result<()> {
        self.cache.tidy()
    }

    /// The guest kernel with its modules.
    ///
    /// # Errors
    /// If a tool or the network is missing, a package is not as expected, or the disk is full.
    pub fn kernel(&self) -> Result<Kernel> {
        self.locked(|_| kernel::build(self))
    }

    /// The initial RAM file system: `guest_binary` as `/init`, and the modules a guest needs.
    ///
    /// # Errors
    /// As [`Builder::kernel`].
    pub fn initramfs(&self, kernel: &Kernel, guest_binary: &Path) -> Result<PathBuf> {
        self.locked(|_| initramfs::build(self, kernel, guest_binary))
    }

    /// A root disk, by its recipe. Needs root, because it creates files of other users.
    ///
    /// # Errors
    /// As [`Builder::kernel`].
    pub fn rootfs(&self, spec: &RootfsSpec) -> Result<Rootfs> {
        self.locked(|lock| rootfs::build(self, spec, lock))
    }

    /// All parts of a template. They belong to the cache: clone or link them before the cache is
    /// cleared.
    ///
    /// # Errors
    /// As [`Builder::kernel`].
    pub fn template(&self, spec: &RootfsSpec, guest_binary: &Path) -> Result<Template> {
        let kernel = self.kernel()?;
        let initramfs = self.initramfs(&kernel, guest_binary)?;
        let rootfs = self.rootfs(spec)?;
        let initramfs_digest = cache::file_digest(&initramfs)?;
        let mut hasher = blake3::Hasher::new();
        for part in [&rootfs.digest, &kernel.release, &initramfs_digest] {
            hasher.update(part.as_bytes()).update(b"\0");
        }
        let digest = hasher.finalize().to_hex().to_string();
        Ok(Template { kernel, initramfs, rootfs, digest })
    }

    /// Builds one part while no other builder works here. A failed build leaves nothing unfinished.
    fn locked<T>(&self, make: impl FnOnce(&File) -> Result<T>) -> Result<T> {
        let lock = self.cache.lock(&self.progress)?;
        let made = make(&lock);
        if made.is_err()
            && let Err(error) = self.cache.discard_unfinished()
        {
            // The next builder tries again. The caller gets the error of the build.
            tracing::warn!(%error, "leftovers of a failed build could not be removed");
        }
        made
    }

    fn say(&self, line: impl AsRef<str>) {
        tracing::debug!(line = line.as_ref(), "image");
        (self.progress)(line.as_ref());
    }
}
