//! What a guest wrote to its serial console, as files of its machine.
//!
//! A guest may write any amount; the host keeps roughly the last [`KEPT`] bytes, in two files of at
//! most half of that each. Monitors that do not write the log have it [pumped](pump).

use crate::{EngineError, Result, VmPaths, process::Task};
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use tokio::{io::AsyncReadExt, net::UnixStream};

/// About how much is kept.
const KEPT: u64 = 256 * 1024;

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

/// Copies a console into its log until the monitor ends.
pub(crate) async fn pump(socket: &Path, paths: &VmPaths) -> Result<Task> {
    let stream = UnixStream::connect(socket).await.map_err(EngineError::at("connect to", socket))?;
    let [path, older] = files(paths);
    let file =
        File::options().create(true).append(true).open(&path).map_err(EngineError::at("open", &path))?;
    Ok(Task(tokio::spawn(async move {
        if let Err(error) = copy(stream, file, &path, &older).await {
            tracing::warn!(path = %path.display(), %error, "the console is no longer logged");
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
