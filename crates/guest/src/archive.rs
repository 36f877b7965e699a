//! Packs and unpacks trees as tar streams, on threads for blocking work.

use crate::files::{FileError, absolute};
use bytes::Bytes;
use keiki_archive::{Counts, Options, Receiver, Sender, base_name};
use keiki_protocol::guest::FileChunk;
use std::{fs, io::Write, path::Path};
use tokio::sync::mpsc;
use tonic::Status;

/// Sends the file or directory at `path` as a tar stream.
pub fn pack(path: &[u8], sender: mpsc::Sender<Result<FileChunk, Status>>) -> Result<(), FileError> {
    let path = absolute(path)?;
    let mut out =
        Sender::new(|data| sender.blocking_send(Ok(FileChunk { data, ..FileChunk::default() })).is_ok());
    keiki_archive::pack(path, &base_name(path), &mut out).map_err(failure)?;
    out.flush().map_err(|_| FileError::CutOff)
}

/// Unpacks a tar stream into the directory `path`.
pub fn unpack(
    path: &[u8],
    options: Options,
    mut pieces: mpsc::Receiver<(Bytes, bool)>,
) -> Result<Counts, FileError> {
    let path = absolute(path)?;
    let is_dir = fs::metadata(path).map(|meta| meta.is_dir());
    if !is_dir.map_err(|error| FileError::System { path: shown(path), error })? {
        return Err(FileError::Invalid(format!("{}: not a directory", shown(path))));
    }
    keiki_archive::unpack(Receiver::new(|| pieces.blocking_recv()), path, options).map_err(failure)
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn failure(error: keiki_archive::Error) -> FileError {
    match error {
        keiki_archive::Error::System { path, source } => FileError::System { path, error: source },
        keiki_archive::Error::NoRoom { .. } => FileError::TooLarge(error.to_string()),
        error => FileError::Invalid(error.to_string()),
    }
}
