//! The directories of a node, and the file system of its store.
//!
//! ```text
//! <data>/keiki.db            records
//! <data>/events.db           what happened to sandboxes
//! <data>/preview.key         seals links to previews
//! <data>/requests.key        key of the digests of idempotent requests
//! <data>/lock, <run>/lock      held by the node that runs on them
//! <data>/cache/              kernels and root disks, made from packages
//! <data>/store.xfs           only where <data>'s file system has no reflinks: mounted on
//! <data>/store/
//!     templates/<name>/<version>/   a baked machine
//!     snapshots/<id>/               a snapshot
//!     hibernated/<id>/              the snapshot a hibernated sandbox wakes from
//!     sandboxes/<id>/               what a running machine owns (and hard links to what it shares)
//!     scratch/                      incomplete directories; emptied at start
//! <run>/<id>/                sockets of a running machine
//! ```
//!
//! A directory counts only if a record names it: what no record names is removed at start.

use crate::error::{Error, Result};
use anyhow::Context;
use keiki_types::{SandboxId, SnapshotId};
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

/// A socket's path has at most 107 bytes; this much comes after the run directory.
const LONGEST_SOCKET_SUFFIX: usize = 1 + 32 + 1 + 16;
const LONGEST_SOCKET_PATH: usize = 107;
/// Space that stays free for what must always succeed: records, logs, metadata of the file system.
const RESERVE_BYTES: u64 = 256 << 20;
/// How long the lock of a directory is asked for.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The directories of a node.
#[derive(Debug, Clone)]
pub struct Store {
    data: PathBuf,
    root: PathBuf,
    run: PathBuf,
    /// We mounted an image of our own.
    own_image: bool,
    /// This node mounted it, not an earlier one.
    fresh_mount: bool,
    /// No other node uses these directories as long as these are open.
    _locks: Arc<[fs::File; 2]>,
}

impl Store {
    /// Makes what is missing, the file system with reflinks included.
    pub async fn open(data: &Path, run: &Path, image_gib: Option<u64>) -> Result<Self> {
        let made = Self::make(data, run, image_gib).await;
        made.map_err(|cause| Error::internal(format!("cannot set up the store in {}", data.display()), cause))
    }

    async fn make(data: &Path, run: &Path, image_gib: Option<u64>) -> anyhow::Result<Self> {
        let longest = run.as_os_str().len() + LONGEST_SOCKET_SUFFIX;
        anyhow::ensure!(
            longest <= LONGEST_SOCKET_PATH,
            "the run directory {} is too long for sockets: use one of at most {} bytes",
            run.display(),
            LONGEST_SOCKET_PATH - LONGEST_SOCKET_SUFFIX
        );
        for dir in [data, run] {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let locks = Arc::new([lock(data)?, lock(run)?]);
        let root = data.join("store");
        fs::create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
        let mut own_image = is_mount_point(&root)?;
        let was_mounted = own_image;
        if !own_image && !keiki_sys::files::has_reflinks(&root).unwrap_or(false) {
            mount_own_image(data, &root, image_gib).await?;
            own_image = true;
        }
        let store = Self {
            data: data.into(),
            root,
            run: run.into(),
            own_image,
            fresh_mount: own_image && !was_mounted,
            _locks: locks,
        };
        make_parts(&store.root)?;
        Ok(store)
    }

    /// Root of the file system with reflinks.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The engine's directory, made if it is missing.
    pub fn engine(&self) -> Result<PathBuf> {
        let dir = self.root.join("engine");
        make_dir(&dir)?;
        Ok(dir)
    }

    /// Something in the data directory, beside the store.
    pub fn in_data(&self, name: &str) -> PathBuf {
        self.data.join(name)
    }

    /// A baked template.
    pub fn template(&self, name: &str, version: &str) -> PathBuf {
        self.root.join("templates").join(name).join(version)
    }

    pub fn snapshot(&self, id: SnapshotId) -> PathBuf {
        self.root.join("snapshots").join(id.to_string())
    }

    /// What a hibernated sandbox wakes from. Distinct per hibernation, so that a crash never mixes
    /// two.
    pub fn hibernated(&self, id: SandboxId, generation: u64) -> PathBuf {
        self.root.join("hibernated").join(format!("{id}.{generation}"))
    }

    /// What a machine owns.
    pub fn sandbox(&self, id: SandboxId) -> PathBuf {
        self.root.join("sandboxes").join(id.to_string())
    }

    /// A new scratch directory.
    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch").join(SandboxId::new().to_string())
    }

    /// Sockets of a machine.
    pub fn run(&self, id: SandboxId) -> PathBuf {
        self.run.join(id.to_string().replace('-', ""))
    }

    /// Root of the run directories.
    pub fn run_root(&self) -> &Path {
        &self.run
    }

    /// Names in one of the store's parts. A partial listing is never taken for a whole one.
    pub fn names(&self, part: &str) -> Result<Vec<String>> {
        list(&self.root.join(part))
    }

    /// Names in the run directory.
    pub fn run_names(&self) -> Result<Vec<String>> {
        list(&self.run)
    }

    /// Free bytes for new data, the reserve not counted.
    pub fn free_bytes(&self) -> Result<u64> {
        Ok(self.space()?.1)
    }

    /// All bytes of the store's file system, and those free for new data.
    pub fn space(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::statvfs(&self.root)
            .map_err(|cause| Error::internal("cannot read the store's free space", cause))?;
        let free = (stat.f_bavail * stat.f_frsize).saturating_sub(RESERVE_BYTES);
        Ok((stat.f_blocks * stat.f_frsize, free))
    }

    /// Removes a whole directory; missing is fine.
    pub async fn remove(&self, dir: PathBuf) -> Result<()> {
        let gone = tokio::task::spawn_blocking(move || {
            remove_tree(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
            keiki_sys::failpoint::reach("remove");
            anyhow::Ok(())
        })
        .await;
        gone.map_err(|cause| Error::internal("a removal was interrupted", cause))?
            .map_err(|cause| Error::internal("a directory of the store cannot be removed", cause))
    }

    /// Removes a directory that nothing needs any more. If that fails the next start does it.
    pub async fn remove_or_log(&self, dir: PathBuf) {
        if let Err(error) = self.remove(dir).await {
            tracing::error!(error = &error as &dyn std::error::Error, "a directory was left behind");
        }
    }

    /// Undoes the opening, for a node that cannot start: nothing runs from what it has just
    /// mounted.
    pub async fn abandon(&self) {
        if self.fresh_mount
            && let Err(error) = self.unmount().await
        {
            tracing::warn!(error = &error as &dyn std::error::Error, "the store stays mounted");
        }
    }

    /// Unmounts an image of our own. Only when no machine runs from it.
    pub async fn unmount(&self) -> Result<()> {
        if self.own_image {
            run("umount", &[self.root.as_os_str()])
                .await
                .map_err(|cause| Error::internal("cannot unmount the store", cause))?;
        }
        Ok(())
    }
}

fn make_parts(root: &Path) -> io::Result<()> {
    let parts = ["templates", "snapshots", "hibernated", "sandboxes", "scratch"];
    parts.iter().try_for_each(|part| fs::create_dir_all(root.join(part)))
}

/// Makes a directory with its parents.
pub fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|cause| match cause.kind() {
        io::ErrorKind::StorageFull => Error::NoRoom("the store is full".into()),
        _ => Error::internal(format!("cannot create {}", dir.display()), cause),
    })
}

/// Allocated bytes of the files below a directory (shared blocks counted in full).
pub fn tree_bytes(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => tree_bytes(&entry.path()),
            Ok(meta) => meta.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

fn list(dir: &Path) -> Result<Vec<String>> {
    let read = || -> io::Result<Vec<String>> {
        fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    read().map_err(|cause| Error::internal(format!("cannot list {}", dir.display()), cause))
}

fn remove_tree(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Two nodes on one directory would each remove what the other made. The lock ends with the
/// process; if the process is killed while it starts a monitor, that child holds the lock for a
/// moment, until it executes.
fn lock(dir: &Path) -> anyhow::Result<fs::File> {
    let path = dir.join("lock");
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(fs::TryLockError::WouldBlock) if begun.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(fs::TryLockError::WouldBlock) => {
                anyhow::bail!("another node is running on {}", dir.display())
            }
            Err(fs::TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
}

fn is_mount_point(dir: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let parent = dir.parent().unwrap_or(dir);
    Ok(fs::metadata(dir)?.dev() != fs::metadata(parent)?.dev())
}

/// Gives the node a file system with reflinks where it has none: an XFS image, its space reserved,
/// so that a full host disk never breaks a running guest.
async fn mount_own_image(data: &Path, root: &Path, image_gib: Option<u64>) -> anyhow::Result<()> {
    let image = data.join("store.xfs");
    if !image.exists() {
        let stat = rustix::fs::statvfs(data)?;
        let free_gib = (stat.f_bavail * stat.f_frsize) >> 30;
        let gib = image_gib.unwrap_or((free_gib / 2).clamp(4, 64));
        anyhow::ensure!(
            gib < free_gib,
            "{} has {free_gib} GiB free and its file system has no reflinks: the store needs an image of {gib} GiB there",
            data.display()
        );
        tracing::info!(gib, "creating an XFS image for the store: this file system has no reflinks");
        let half_made = data.join("store.xfs.partial");
        let _ = fs::remove_file(&half_made);
        let file = fs::File::create(&half_made)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, gib << 30)
            .with_context(|| format!("cannot reserve {gib} GiB for the store"))?;
        run("mkfs.xfs", &["-q".as_ref(), "-m".as_ref(), "reflink=1".as_ref(), half_made.as_os_str()]).await?;
        file.sync_all()?;
        fs::rename(&half_made, &image)?;
        fs::File::open(data)?.sync_all()?;
    }
    let direct = loop_device(&image, true).await;
    let device = match direct {
        Ok(device) => device,
        Err(_) => loop_device(&image, false).await?,
    };
    let mounted = run("mount", &["-o".as_ref(), "noatime".as_ref(), device.as_ref(), root.as_os_str()]).await;
    // Released with its last user, so that unmounting leaves nothing.
    run("losetup", &["-d".as_ref(), device.as_ref()]).await?;
    mounted.map(drop)
}

async fn loop_device(image: &Path, direct: bool) -> anyhow::Result<String> {
    let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
    run("losetup", &[direct.as_ref(), "--find".as_ref(), "--show".as_ref(), image.as_os_str()]).await
}

/// Runs a tool of the host to its end. Start-up only, never on a verb's path.
async fn run(tool: &str, args: &[&std::ffi::OsStr]) -> anyhow::Result<String> {
    let done = tokio::process::Command::new(tool)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| format!("cannot run {tool}: is it installed?"))?;
    anyhow::ensure!(
        done.status.success(),
        "{tool} failed: {}",
        String::from_utf8_lossy(&done.stderr).trim().replace('\n', "; ")
    );
    Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Arc, Duration, Path, Store, fs, lock, make_parts};

    impl Store {
        /// On directories whose file system is taken as it is.
        pub fn in_dirs(data: &Path, run: &Path) -> anyhow::Result<Self> {
            let root = data.join("store");
            make_parts(&root)?;
            fs::create_dir_all(run)?;
            let _locks = Arc::new([lock(data)?, lock(run)?]);
            let (data, run) = (data.into(), run.into());
            Ok(Self { data, root, run, own_image: false, fresh_mount: false, _locks })
        }
    }

    #[test]
    fn a_directory_has_one_node() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let first = lock(dir.path())?;
        let refused = lock(dir.path()).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.starts_with("another node is running on"), "{refused}");
        // What a killed node leaves it to lets go soon.
        let soon = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(first);
        });
        lock(dir.path())?;
        soon.join().map_err(|_| anyhow::anyhow!("it panicked"))
    }
}
