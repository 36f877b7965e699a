//! Kernel, initramfs and root disks out of distribution packages. Runs no machine.
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
//! Everything lands in one cache directory, and every finished part is one name in it that appears by a
//! rename: an interrupted build leaves only `tmp/`, which the next builder empties, and goes on from the
//! parts that were finished. The name of a part is derived from what it was made of, so a changed recipe
//! never meets an old part. One builder works at a time; others wait for the lock.
//!
//! The host stays as it is: packages come through an apt configuration of our own (sources, lists and
//! archives under the cache) and are unpacked, not installed; nothing is mounted. The mirror is the one the
//! host itself uses, see [`Builder::with_mirror`].
//!
//! Calls block, some for a minute. A caller that must not block puts them on a thread of their own.

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

/// Part of every digest: raised when the same recipe would now give other bytes.
const BUILDER_VERSION: u32 = 1;

/// Takes one line of progress, for people.
pub type Progress = Arc<dyn Fn(&str) + Send + Sync>;

/// Makes kernels, initramfs images and root disks in a cache directory.
#[derive(Clone)]
pub struct Builder {
    cache: Cache,
    progress: Progress,
    mirror: Option<String>,
    refresh: bool,
}

/// All a first boot reads, and the digest that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// The kernel and its modules.
    pub kernel: Kernel,
    /// Initial RAM file system with the guest agent as `/init`.
    pub initramfs: PathBuf,
    /// The root disk.
    pub rootfs: Rootfs,
    /// Names the contents: the recipe, every package version, the kernel, the guest agent and the builder.
    pub digest: String,
}

impl Builder {
    /// A builder that keeps finished parts in `cache` and tells what it does line by line.
    pub fn new(cache: impl Into<PathBuf>, progress: Progress) -> Self {
        Self { cache: Cache::new(cache.into()), progress, mirror: None, refresh: false }
    }

    /// Uses this package mirror instead of the one of the host's own apt configuration.
    #[must_use]
    pub fn with_mirror(mut self, mirror: impl Into<String>) -> Self {
        self.mirror = Some(mirror.into());
        self
    }

    /// Makes parts anew although they are finished, to take in newer packages.
    #[must_use]
    pub fn refresh(mut self, yes: bool) -> Self {
        self.refresh = yes;
        self
    }

    /// Removes what builds that were cut short left in the cache, unless one is under way.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn tidy(&self) -> Result<()> {
        self.cache.tidy()
    }

    /// The guest kernel with its modules.
    ///
    /// # Errors
    /// A tool or the network is missing, a package is not what it should be, or the disk is full.
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

    /// A root disk by its recipe. Needs root: it makes files of other users.
    ///
    /// # Errors
    /// As [`Builder::kernel`].
    pub fn rootfs(&self, spec: &RootfsSpec) -> Result<Rootfs> {
        self.locked(|lock| rootfs::build(self, spec, lock))
    }

    /// All of a template. The parts belong to the cache: clone or link them before the cache is cleared.
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

    /// Makes one part while no other builder is at work here. A failed one leaves nothing unfinished.
    fn locked<T>(&self, make: impl FnOnce(&File) -> Result<T>) -> Result<T> {
        let lock = self.cache.lock(&self.progress)?;
        let made = make(&lock);
        if made.is_err()
            && let Err(error) = self.cache.discard_unfinished()
        {
            // The next builder tries again; what its caller should read is why this one failed.
            tracing::warn!(%error, "what a failed build left was not removed");
        }
        made
    }

    fn say(&self, line: impl AsRef<str>) {
        tracing::debug!(line = line.as_ref(), "image");
        (self.progress)(line.as_ref());
    }

    fn mirror(&self) -> Result<String> {
        match &self.mirror {
            Some(mirror) => Ok(mirror.trim_end_matches('/').to_owned()),
            None => apt::host_mirror(),
        }
    }
}
