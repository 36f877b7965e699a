//! What a guest wrote to its serial console, as files of its machine.

use crate::VmPaths;
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// The log's file, and the older one before it, if the engine has one.
pub(crate) fn files(paths: &VmPaths) -> [PathBuf; 2] {
    [paths.dir.join("console.log"), paths.dir.join("console.log.1")]
}

/// The last bytes, at most `limit`.
pub(crate) fn tail(paths: &VmPaths, limit: usize) -> Vec<u8> {
    let [path, older] = files(paths);
    let mut bytes = last_of(&path, limit);
    if bytes.len() < limit {
        let mut before = last_of(&older, limit - bytes.len());
        before.append(&mut bytes);
        bytes = before;
    }
    bytes
}

fn last_of(path: &Path, limit: usize) -> Vec<u8> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(limit as u64)))?;
        let mut bytes = Vec::new();
        file.take(limit as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read().unwrap_or_default()
}
