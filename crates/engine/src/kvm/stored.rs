//! The files of a stored machine, opened for the zygotes that are loaded from them.

use super::working_set::{self, FirstRun};
use crate::{EngineError, Result, fsutil, layers::new_name};
use keiki_control::Role;
use keiki_snapshot::{Format, MEMORY_FILE, Manifest, STATE_FILE};
use keiki_types::Shape;
use std::{
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

/// Files of a stored machine, opened.
#[derive(Debug)]
pub(super) struct StoredFiles {
    pub(super) dir: PathBuf,
    pub(super) shape: Shape,
    pub(super) digest: [u8; 32],
    memory: File,
    state: File,
}

impl StoredFiles {
    pub(super) fn open(dir: &Path, manifest: &Manifest) -> Result<Self> {
        let open = |name: &str| {
            let path = dir.join(name);
            File::open(&path).map_err(EngineError::at("open", &path))
        };
        let digest = blake3::Hash::from_hex(&manifest.state.blake3).map_err(|_| EngineError::Refused {
            dir: dir.to_owned(),
            why: "the digest of its state is not a BLAKE3 digest".into(),
        })?;
        Ok(Self {
            dir: dir.to_owned(),
            shape: manifest.shape,
            digest: *digest.as_bytes(),
            memory: open(MEMORY_FILE)?,
            state: open(STATE_FILE)?,
        })
    }

    /// For a zygote. Its memory is either the file, or if `alone` a copy without a name in `store`,
    /// which shares blocks on disk but no page in memory: reading it shows nothing of what others
    /// read.
    pub(super) fn descriptors(&self, alone: bool, store: &Path) -> Result<[(Role, OwnedFd); 2]> {
        let memory = if alone { self.copy_memory(store)? } else { self.reopen(&self.memory)? };
        Ok([(Role::Memory, memory.into()), (Role::State, self.reopen(&self.state)?.into())])
    }

    /// Has the kernel read what a machine will touch first, if that is known.
    pub(super) fn read_ahead(&self) {
        working_set::read_ahead(&self.dir, &self.memory);
    }

    /// What a machine that is thawed from them touches first, if that is known.
    pub(super) fn working_set(&self) -> Option<(Role, OwnedFd)> {
        working_set::list(&self.dir, &self.memory).map(|list| (Role::Pages, list))
    }

    /// A machine was thawed from them.
    pub(super) fn thawed(&self, pid: u32) -> Option<FirstRun> {
        working_set::record_later(&self.dir, &self.memory, pid)
    }

    /// Which file the memory is: device and inode.
    pub(super) fn key(&self) -> Result<(u64, u64)> {
        let meta = self.memory.metadata().map_err(EngineError::at("inspect", &self.dir))?;
        Ok((meta.dev(), meta.ino()))
    }

    /// The same file with a separate position.
    fn reopen(&self, file: &File) -> Result<File> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::open(path).map_err(EngineError::at("open", &self.dir))
    }

    fn copy_memory(&self, store: &Path) -> Result<File> {
        let path = store.join(format!(".{}", new_name(Format::Raw)));
        let to = File::create_new(&path).map_err(EngineError::at("make", &path))?;
        let copied = keiki_sys::files::reflink(&self.memory, &to)
            .and_then(|()| File::open(&path))
            .map_err(EngineError::at("copy memory to", &path));
        fsutil::remove_file(&path)?;
        copied
    }
}
