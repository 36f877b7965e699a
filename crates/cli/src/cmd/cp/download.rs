//! From a sandbox to here.

use super::{Copier, base_name, follow, join};
use crate::exit::{Failure, io_error};
use futures::StreamExt;
use keiki_client::api::FsEntry;
use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tokio::{
    fs::{self, OpenOptions},
    io::AsyncWriteExt,
};

/// Copies `from` to `to`, or into it if it is a directory.
pub(super) async fn copy(copier: &mut Copier, from: &str, to: &Path) -> Result<(), Failure> {
    let (source, entry) = follow(copier, from).await?;
    let to_dir = fs::metadata(to).await.is_ok_and(|meta| meta.is_dir());
    let slash = to.as_os_str().as_encoded_bytes().ends_with(b"/");
    let target = if to_dir || (slash && !entry.is_dir) {
        let name = base_name(from)
            .ok_or_else(|| Failure::Usage(format!("{from:?} has no name to give to the copy: name it")))?;
        to.join(name)
    } else {
        to.to_owned()
    };
    if slash && !to_dir && !entry.is_dir {
        fs::create_dir_all(to).await.map_err(io_error(to.display().to_string()))?;
    }
    if entry.is_dir {
        tree(copier, &source, &target, mode_of(&entry)).await
    } else if entry.kind == "file" {
        file(copier, &source, &target, mode_of(&entry)).await
    } else {
        Err(Failure::Usage(format!("{from:?} is a {}, neither a file nor a directory", entry.kind)))
    }
}

/// Permission bits. A sandbox gives no file here the power of its owner: no set-id bits.
fn mode_of(entry: &FsEntry) -> u32 {
    u32::from_str_radix(&entry.mode, 8).unwrap_or(0o644) & 0o777
}

/// May a name that a sandbox lists be used here?
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

async fn tree(copier: &mut Copier, from: &str, to: &Path, mode: u32) -> Result<(), Failure> {
    let mut waiting: Vec<(String, PathBuf, u32)> = vec![(from.to_owned(), to.to_owned(), mode)];
    // Modes come last: a directory that may not be written must be filled first.
    let mut modes = Vec::new();
    while let Some((dir, target, mode)) = waiting.pop() {
        make_dir(&target).await?;
        copier.copied.dirs += 1;
        modes.push((target.clone(), mode));
        for entry in copier.client.list_dir(copier.id, &dir).await? {
            if !is_plain(&entry.name) {
                return Err(Failure::Wrong(format!("the sandbox lists {:?}, which is no name", entry.name)));
            }
            let (from, to) = (join(&dir, &entry.name), target.join(&entry.name));
            match (entry.is_dir, entry.kind.as_str(), &entry.target) {
                (true, ..) if !entry.name.contains(char::REPLACEMENT_CHARACTER) => {
                    waiting.push((from, to, mode_of(&entry)))
                }
                // The bytes of its name are no text, so it cannot be asked for.
                _ if entry.name.contains(char::REPLACEMENT_CHARACTER) => copier.copied.skipped.push(from),
                (_, "file", _) => file(copier, &from, &to, mode_of(&entry)).await?,
                (_, "symlink", Some(points)) => symlink(copier, points, &to).await?,
                _ => copier.copied.skipped.push(from),
            }
        }
    }
    for (target, mode) in modes.into_iter().rev() {
        let set = fs::set_permissions(&target, Permissions::from_mode(mode)).await;
        set.map_err(io_error(target.display().to_string()))?;
    }
    Ok(())
}

/// Makes a directory, or uses one that is there; never one behind a symlink.
async fn make_dir(path: &Path) -> Result<(), Failure> {
    let failed = || io_error(path.display().to_string());
    match fs::symlink_metadata(path).await {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(Failure::Wrong(format!("{} is in the way: it is no directory", path.display()))),
        Err(_) => fs::create_dir_all(path).await.map_err(failed()),
    }
}

async fn symlink(copier: &mut Copier, points: &str, to: &Path) -> Result<(), Failure> {
    let temporary = temporary(to);
    let failed = || io_error(to.display().to_string());
    fs::symlink(points, &temporary).await.map_err(failed())?;
    if let Err(error) = fs::rename(&temporary, to).await {
        let _ = fs::remove_file(&temporary).await;
        return Err(failed()(error));
    }
    copier.copied.symlinks += 1;
    Ok(())
}

/// The new file appears whole, under its name, or not at all; a symlink of that name is replaced, not followed.
async fn file(copier: &mut Copier, from: &str, to: &Path, mode: u32) -> Result<(), Failure> {
    copier.say(from);
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

/// Removes a half-written file, also when the copy is dropped by Ctrl-C.
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
    use super::{is_plain, make_dir};

    #[test]
    fn names_from_a_sandbox_stay_where_they_belong() {
        for good in ["a", "a b", "é", "...", "a\nb", "-rf"] {
            assert!(is_plain(good), "{good:?}");
        }
        for bad in ["", ".", "..", "a/b", "/etc", "a\0"] {
            assert!(!is_plain(bad), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn directories_behind_symlinks_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc", dir.path().join("link")).unwrap();
        assert!(make_dir(&dir.path().join("link")).await.is_err());
        assert!(make_dir(&dir.path().join("new")).await.is_ok());
        assert!(make_dir(&dir.path().join("new")).await.is_ok());
    }
}
