//! The guest's serial console, kept in two files of at most half the limit each.
//!
//! A guest writes as much as it likes; the host keeps the last [`KEPT`] bytes or so.

use super::process::Task;
use crate::{EngineError, Resources, Result};
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use tokio::{io::AsyncReadExt, net::UnixStream};

/// About how much is kept.
const KEPT: u64 = 256 * 1024;

/// The log's file, and the older one before it.
pub(super) fn files(resources: &Resources) -> [PathBuf; 2] {
    [resources.dir.join("console.log"), resources.dir.join("console.log.1")]
}

/// Copies the console into its log until the monitor ends.
pub(super) async fn pump(socket: &Path, resources: &Resources) -> Result<Task> {
    let stream = UnixStream::connect(socket).await.map_err(EngineError::at("connect to", socket))?;
    let [path, older] = files(resources);
    let file =
        File::options().create(true).append(true).open(&path).map_err(EngineError::at("open", &path))?;
    Ok(Task(tokio::spawn(async move {
        if let Err(error) = copy(stream, file, &path, &older).await {
            tracing::warn!(path = %path.display(), %error, "the console is not logged any more");
        }
    })))
}

async fn copy(mut stream: UnixStream, mut file: File, path: &Path, older: &Path) -> std::io::Result<()> {
    let mut written = file.metadata()?.len();
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let count = stream.read(&mut buffer).await?;
        let Some(bytes) = buffer.get(..count).filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
        if written + count as u64 > KEPT / 2 {
            std::fs::rename(path, older)?;
            file = File::options().create(true).append(true).open(path)?;
            written = 0;
        }
        // A full disk costs console output, not the machine.
        if file.write_all(bytes).is_ok() {
            written += count as u64;
        }
    }
}

/// The last bytes, at most `limit`.
pub(super) fn tail(resources: &Resources, limit: usize) -> Vec<u8> {
    let [path, older] = files(resources);
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
