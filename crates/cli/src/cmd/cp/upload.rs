//! Copies from this machine into a sandbox.

use super::copier::{Copier, base_name, follow, join};
use crate::exit::{Failure, io_error};
use bytes::Bytes;
use futures::{Stream, stream};
use keiki_client::Unpacking;
use std::{ffi::OsStr, io::Write, os::unix::fs::PermissionsExt, path::Path};
use tokio::{
    fs::{self, File},
    io::AsyncReadExt,
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;

const CHUNK: usize = 256 << 10;
/// Pieces buffered between the thread that packs and the connection.
const PIECES: usize = 4;

/// Copies `from` to `to`, or into `to` if it is a directory.
pub(super) async fn copy(copier: &mut Copier, from: &Path, to: &str) -> Result<(), Failure> {
    let meta = fs::metadata(from).await.map_err(io_error(from.display().to_string()))?;
    let target = match follow(copier, to).await {
        Ok((_, entry)) if entry.is_dir => into_dir(from, to).await?,
        Ok(_) => to.to_owned(),
        Err(Failure::Node(error)) if error.is_not_found() => {
            if to.ends_with('/') && !meta.is_dir() {
                into_dir(from, to).await?
            } else {
                to.trim_end_matches('/').to_owned()
            }
        }
        Err(error) => return Err(error),
    };
    if base_name(&target).is_none() && !meta.is_dir() {
        return Err(Failure::Usage(format!("not a file name: {target}")));
    }
    if meta.is_dir() {
        tree(copier, from, &target).await
    } else if meta.is_file() {
        file(copier, from, &target, meta.permissions().mode()).await
    } else {
        Err(Failure::Usage(format!("{}: can only copy files and directories", from.display())))
    }
}

async fn into_dir(from: &Path, dir: &str) -> Result<String, Failure> {
    // `.` and `..` take the name of the directory they stand for.
    let whole = fs::canonicalize(from).await.map_err(io_error(from.display().to_string()))?;
    let named = from.file_name().or(whole.file_name());
    match named.and_then(|name| name.to_str()) {
        Some(name) => Ok(join(dir, name)),
        None => Err(Failure::Usage(format!("{} has no name: name the destination", from.display()))),
    }
}

/// Sends a directory as one stream, packed on a thread.
async fn tree(copier: &mut Copier, from: &Path, to: &str) -> Result<(), Failure> {
    copier.announce(to);
    let is_new = match copier.client.stat(copier.id, to).await {
        Ok(_) => false,
        Err(error) if error.is_not_found() => true,
        Err(error) => return Err(error.into()),
    };
    copier.client.mkdir(copier.id, to, None).await?;
    let (send, pieces) = mpsc::channel(PIECES);
    let from = from.to_owned();
    let packing = tokio::task::spawn_blocking(move || {
        let mut out = keiki_archive::Sender::new(|piece| send.blocking_send(Ok(piece)).is_ok());
        let packed = keiki_archive::pack(&from, OsStr::new("top"), &mut out);
        // A broken stream must not look complete at the other end.
        if packed.is_err() || out.flush().is_err() {
            drop(out);
            let _ = send.blocking_send(Err(std::io::ErrorKind::BrokenPipe.into()));
        }
        packed
    });
    let how = Unpacking { owners: copier.owners, strip_top: true };
    let sent = copier.client.write_archive(copier.id, to, how, ReceiverStream::new(pieces)).await;
    let packed = packing.await.map_err(|_| Failure::Wrong("the packing thread panicked".into()))?;
    let refusal = match (sent, packed) {
        (Ok(unpacked), Ok(counts)) => {
            copier.copied.add(&unpacked);
            copier.copied.skipped += counts.skipped;
            return Ok(());
        }
        // Why the node refused says more than that packing broke off.
        (Err(error), _) if error.status().is_some() => Failure::Node(error),
        (_, Err(error)) => Failure::Archive(error),
        (Err(error), Ok(_)) => Failure::Node(error),
    };
    if is_new {
        // Succeeds only if it is still empty.
        let _ = copier.client.remove_path(copier.id, to, false).await;
    }
    Err(refusal)
}

async fn file(copier: &mut Copier, from: &Path, to: &str, mode: u32) -> Result<(), Failure> {
    copier.announce(to);
    let file = File::open(from).await.map_err(io_error(from.display().to_string()))?;
    let written = copier.client.write_file(copier.id, to, Some(mode & 0o7777), chunks(file)).await?;
    copier.copied.files += 1;
    copier.copied.bytes += written.bytes;
    Ok(())
}

fn chunks(file: File) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    stream::try_unfold(file, |mut file| async move {
        let mut buffer = Vec::with_capacity(CHUNK);
        let count = file.read_buf(&mut buffer).await?;
        Ok((count > 0).then(|| (Bytes::from(buffer), file)))
    })
}
