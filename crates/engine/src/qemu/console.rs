//! The guest's serial console, kept in two files of at most half the limit each.
//!
//! A guest writes as much as it likes; the host keeps the last [`KEPT`] bytes or so.

use crate::{EngineError, Result, VmPaths, console::files, process::Task};
use std::{fs::File, io::Write, path::Path};
use tokio::{io::AsyncReadExt, net::UnixStream};

/// About how much is kept.
const KEPT: u64 = 256 * 1024;

/// Copies the console into its log until the monitor ends.
pub(super) async fn pump(socket: &Path, paths: &VmPaths) -> Result<Task> {
    let stream = UnixStream::connect(socket).await.map_err(EngineError::at("connect to", socket))?;
    let [path, older] = files(paths);
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
