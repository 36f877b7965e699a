//! The cache directory: finished parts by name, unfinished ones under `tmp/`, one builder at a
//! time.
//!
//! ```text
//! cache/lock             held during a build
//! cache/tmp/             unfinished parts; emptied by the next builder
//! cache/kernel/<key>/    finished parts; <key> is derived from the recipe
//! cache/initramfs/<key>
//! cache/rootfs/<key>/
//! cache/apt/, debs/      downloads, kept between builds
//! ```

use crate::{
    Progress,
    error::{Result, io_error},
};
use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};

/// A cache directory.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    root: PathBuf,
}

impl Cache {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Waits until no other builder works here, then removes leftovers of interrupted builds.
    pub(crate) fn lock(&self, progress: &Progress) -> Result<File> {
        let path = self.root.join("lock");
        fs::create_dir_all(&self.root).map_err(io_error("creating", &self.root))?;
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(io_error("opening", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress("waiting for another build in the same cache");
                file.lock().map_err(io_error("locking", &path))?;
            }
            Err(TryLockError::Error(source)) => return Err(io_error("locking", &path)(source)),
        }
        self.discard_unfinished()?;
        Ok(file)
    }

    /// Removes leftovers of interrupted builds, unless a build is under way.
    pub(crate) fn tidy(&self) -> Result<()> {
        let path = self.root.join("lock");
        let Ok(file) = File::options().write(true).open(&path) else { return Ok(()) };
        match file.try_lock() {
            Ok(()) => self.discard_unfinished(),
            Err(TryLockError::WouldBlock) => Ok(()),
            Err(TryLockError::Error(source)) => Err(io_error("locking", &path)(source)),
        }
    }

    /// Removes unfinished parts. Call it with the lock held.
    pub(crate) fn discard_unfinished(&self) -> Result<()> {
        remove(&self.root.join("tmp"))
    }

    /// Where a finished part is or will be.
    pub(crate) fn part(&self, kind: &str, key: &str) -> PathBuf {
        self.root.join(kind).join(key)
    }

    /// A directory that is kept between builds, such as downloads.
    pub(crate) fn dir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(name);
        fs::create_dir_all(&dir).map_err(io_error("creating", &dir))?;
        // Tools get this path but run in another directory.
        fs::canonicalize(&dir).map_err(io_error("resolving", &dir))
    }

    /// A new path for an unfinished part. Call it with the lock held.
    pub(crate) fn scratch(&self, name: &str) -> Result<PathBuf> {
        let path = self.dir("tmp")?.join(name);
        remove(&path)?;
        Ok(path)
    }

    /// Durably makes `scratch` the finished `part`. Replaces a part of that name; other links to
    /// its files stay valid.
    pub(crate) fn publish(&self, scratch: &Path, part: &Path) -> Result<()> {
        sync_tree(scratch)?;
        let parent = part.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent).map_err(io_error("creating", parent))?;
        if part.is_dir() {
            let old = self.scratch("replaced")?;
            fs::rename(part, &old).map_err(io_error("moving", part))?;
        }
        fs::rename(scratch, part).map_err(io_error("moving", scratch))?;
        sync_dir(parent)?;
        self.discard_unfinished()
    }
}

/// The name of a part made from `ingredients`.
pub(crate) fn key(ingredients: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&crate::BUILDER_VERSION.to_le_bytes());
    for ingredient in ingredients {
        hasher.update(&(ingredient.len() as u64).to_le_bytes()).update(ingredient.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// The digest of a file's contents, in hex.
pub(crate) fn file_digest(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(io_error("opening", path))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).map_err(io_error("reading", path))?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Removes a file or a tree, if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let result = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    result.map_err(io_error("removing", path))
}

fn sync_tree(path: &Path) -> Result<()> {
    let meta = fs::symlink_metadata(path).map_err(io_error("reading", path))?;
    if meta.is_dir() {
        for entry in fs::read_dir(path).map_err(io_error("listing", path))? {
            sync_tree(&entry.map_err(io_error("listing", path))?.path())?;
        }
        sync_dir(path)
    } else if meta.is_file() {
        sync_dir(path)
    } else {
        Ok(())
    }
}

fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(io_error("syncing", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn tidying_takes_leftovers_but_never_from_a_build_under_way() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path().join("cache"));
        cache.tidy().unwrap();
        let silent: Progress = Arc::new(|_| ());
        let lock = cache.lock(&silent).unwrap();
        let scratch = cache.scratch("x").unwrap();
        fs::create_dir(&scratch).unwrap();
        cache.tidy().unwrap();
        assert!(scratch.exists(), "the build that holds the lock lost its files");
        drop(lock);
        cache.tidy().unwrap();
        assert!(!scratch.exists(), "what the build left is still there");
    }

    #[test]
    fn a_part_appears_whole_and_leftovers_go() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path().join("cache"));
        let silent: Progress = Arc::new(|_| ());
        let lock = cache.lock(&silent).unwrap();
        let scratch = cache.scratch("x").unwrap();
        fs::create_dir(&scratch).unwrap();
        fs::write(scratch.join("f"), "1").unwrap();
        let part = cache.part("kind", "k");
        cache.publish(&scratch, &part).unwrap();
        assert_eq!(fs::read_to_string(part.join("f")).unwrap(), "1");
        assert!(!scratch.exists());

        // Replaced as a whole.
        let scratch = cache.scratch("x").unwrap();
        fs::create_dir(&scratch).unwrap();
        fs::write(scratch.join("g"), "2").unwrap();
        cache.publish(&scratch, &part).unwrap();
        assert!(!part.join("f").exists() && part.join("g").exists());

        // An interrupted build's leavings are gone for the next one.
        let left = cache.scratch("half").unwrap();
        fs::write(&left, "half").unwrap();
        drop(lock);
        let _lock = cache.lock(&silent).unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn keys_keep_ingredients_apart() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab"]), key(&["ab"]));
    }
}
