//! Copies from a sandbox to this machine.

use super::copier::{Copier, base_name, follow};
use crate::{
    exit::{Failure, io_error},
    signals::unless_interrupted,
};
use bytes::Bytes;
use futures::StreamExt;
use keiki_archive::{Options, Receiver};
use keiki_client::api::FsEntry;
use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tokio::{
    fs::{self, OpenOptions},
    io::AsyncWriteExt,
    sync::mpsc,
};

/// Pieces buffered between the connection and the thread that unpacks.
const PIECES: usize = 4;

/// Copies `from` to `to`, or into `to` if it is a directory.
pub(super) async fn copy(copier: &mut Copier, from: &str, to: &Path) -> Result<(), Failure> {
    let (source, entry, target) = unless_interrupted(prepare(copier, from, to)).await?;
    if entry.is_dir {
        tree(copier, &source, &target).await
    } else if entry.kind == "file" {
        unless_interrupted(file(copier, &source, &target, mode_of(&entry))).await
    } else {
        Err(Failure::Usage(format!("{from} is a {}: can only copy files and directories", entry.kind)))
    }
}

/// Resolves both ends: the source, its entry, and the destination.
async fn prepare(copier: &Copier, from: &str, to: &Path) -> Result<(String, FsEntry, PathBuf), Failure> {
    let (source, entry) = follow(copier, from).await?;
    let to_dir = fs::metadata(to).await.is_ok_and(|meta| meta.is_dir());
    let slash = to.as_os_str().as_encoded_bytes().ends_with(b"/");
    let target = if to_dir || (slash && !entry.is_dir) {
        let name = base_name(from)
            .ok_or_else(|| Failure::Usage(format!("{from} has no name: name the destination")))?;
        to.join(name)
    } else {
        to.to_owned()
    };
    if slash && !to_dir && !entry.is_dir {
        fs::create_dir_all(to).await.map_err(io_error(to.display().to_string()))?;
    }
    Ok((source, entry, target))
}

/// Permission bits, without set-id: a sandbox must not create privileged files here.
fn mode_of(entry: &FsEntry) -> u32 {
    u32::from_str_radix(&entry.mode, 8).unwrap_or(0o644) & 0o777
}

/// Receives a directory as one stream, unpacked on a thread. A signal still waits for that thread,
/// which deletes incomplete files.
async fn tree(copier: &mut Copier, from: &str, to: &Path) -> Result<(), Failure> {
    copier.announce(from);
    let is_new = make_dir(to).await?;
    let (send, mut pieces) = mpsc::channel::<(Bytes, bool)>(PIECES);
    // Only root may give files away.
    let owners = copier.owners && rustix::process::geteuid().is_root();
    let (into, options) = (to.to_owned(), Options { owners, special_bits: false, strip_top: true });
    let unpacking = tokio::task::spawn_blocking(move || {
        keiki_archive::unpack(Receiver::new(|| pieces.blocking_recv()), &into, options)
    });
    let fed = unless_interrupted(async {
        let mut stream = copier.client.read_archive(copier.id, from).await?;
        while let Some(piece) = stream.next().await {
            if send.send((piece?, false)).await.is_err() {
                // Unpacking failed, and says why.
                return Ok(());
            }
        }
        let _ = send.send((Bytes::new(), true)).await;
        Ok(())
    })
    .await;
    drop(send);
    let unpacked = unpacking.await.map_err(|_| Failure::Wrong("the unpacking thread panicked".into()))?;
    let failure = match (fed, unpacked) {
        (Ok(()), Ok(counts)) => {
            copier.copied.files += counts.files;
            copier.copied.dirs += counts.dirs;
            copier.copied.symlinks += counts.symlinks;
            copier.copied.bytes += counts.bytes;
            return Ok(());
        }
        (Err(failure), _) => failure,
        (Ok(()), Err(error)) => Failure::Archive(error),
    };
    if is_new {
        // Succeeds only if it is still empty.
        let _ = fs::remove_dir(to).await;
    }
    Err(failure)
}

/// Creates a directory, or uses an existing one that is not behind a symlink. Is it new?
async fn make_dir(path: &Path) -> Result<bool, Failure> {
    let failed = || io_error(path.display().to_string());
    match fs::symlink_metadata(path).await {
        Ok(meta) if meta.is_dir() => Ok(false),
        Ok(_) => Err(Failure::Wrong(format!("{} exists and is not a directory", path.display()))),
        Err(_) => fs::create_dir_all(path).await.map_err(failed()).map(|()| true),
    }
}

/// Creates the file atomically. A symlink of that name is replaced, not followed.
async fn file(copier: &mut Copier, from: &str, to: &Path, mode: u32) -> Result<(), Failure> {
    copier.announce(from);
    let temporary = temporary(to);
    let guard = Unfinished(Some(&temporary));
    let failed = || io_error(to.display().to_string());
    let mut reader = copier.client.read_file(copier.id, from).await?;
    let open = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary).await;
    let mut out = open.map_err(failed())?;
    while let Some(chunk) = reader.chunks.next().await {
        let chunk = chunk?;
        out.write_all(&chunk).await.map_err(failed())?;
        copier.copied.bytes += chunk.len() as u64;
    }
    out.set_permissions(Permissions::from_mode(mode)).await.map_err(failed())?;
    out.flush().await.map_err(failed())?;
    fs::rename(&temporary, to).await.map_err(failed())?;
    guard.done();
    copier.copied.files += 1;
    Ok(())
}

fn temporary(to: &Path) -> PathBuf {
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    to.with_file_name(format!(".keiki-cp-{}-{count}", std::process::id()))
}

static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Deletes a half-written file, even when Ctrl-C drops the copy.
struct Unfinished<'a>(Option<&'a Path>);

impl Unfinished<'_> {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::make_dir;

    #[tokio::test]
    async fn directories_behind_symlinks_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc", dir.path().join("link")).unwrap();
        assert!(make_dir(&dir.path().join("link")).await.is_err());
        assert!(make_dir(&dir.path().join("new")).await.is_ok());
        assert!(make_dir(&dir.path().join("new")).await.is_ok());
    }
}
