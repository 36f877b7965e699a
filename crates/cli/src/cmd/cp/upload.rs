//! From here into a sandbox.

use super::{Copier, base_name, follow, join};
use crate::exit::{Failure, io_error};
use bytes::Bytes;
use futures::{Stream, stream};
use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tokio::{
    fs::{self, File},
    io::AsyncReadExt,
};

const CHUNK: usize = 256 << 10;

/// Copies `from` to `to`, or into it if it is a directory.
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
        return Err(Failure::Usage(format!("{target:?} is no name for a file")));
    }
    if meta.is_dir() {
        tree(copier, from, &target).await
    } else if meta.is_file() {
        file(copier, from, &target, meta.permissions().mode()).await
    } else {
        Err(Failure::Usage(format!("{} is neither a file nor a directory", from.display())))
    }
}

async fn into_dir(from: &Path, dir: &str) -> Result<String, Failure> {
    // `.` and `..` have no name of their own; the directory they mean has.
    let whole = fs::canonicalize(from).await.map_err(io_error(from.display().to_string()))?;
    let named = from.file_name().or(whole.file_name());
    match named.and_then(|name| name.to_str()) {
        Some(name) => Ok(join(dir, name)),
        None => Err(Failure::Usage(format!("{} has no name to give to the copy", from.display()))),
    }
}

/// Directories wait in a list, not on the stack: a tree may be deep.
async fn tree(copier: &mut Copier, from: &Path, to: &str) -> Result<(), Failure> {
    let mut waiting: Vec<(PathBuf, String)> = vec![(from.to_owned(), to.to_owned())];
    // Modes come last: a directory that may not be written must be filled first.
    let mut modes = Vec::new();
    while let Some((dir, target)) = waiting.pop() {
        let failed = || io_error(dir.display().to_string());
        let mode = fs::metadata(&dir).await.map_err(failed())?.permissions().mode() & 0o7777;
        copier.client.mkdir(copier.id, &target, Some(mode | 0o700)).await?;
        copier.copied.dirs += 1;
        modes.push((target.clone(), mode));
        let mut entries = fs::read_dir(&dir).await.map_err(failed())?;
        while let Some(entry) = entries.next_entry().await.map_err(failed())? {
            let path = entry.path();
            let name = entry.file_name();
            let Some(name) = name.to_str() else {
                copier.copied.skipped.push(path.to_string_lossy().into_owned());
                continue;
            };
            let target = join(&target, name);
            let meta = entry.metadata().await.map_err(io_error(path.display().to_string()))?;
            if meta.is_dir() {
                waiting.push((path, target));
            } else if meta.is_file() {
                file(copier, &path, &target, meta.permissions().mode()).await?;
            } else if meta.is_symlink() {
                symlink(copier, &path, &target).await?;
            } else {
                copier.copied.skipped.push(path.to_string_lossy().into_owned());
            }
        }
    }
    for (target, mode) in modes.into_iter().rev() {
        copier.client.chmod(copier.id, &target, mode).await?;
    }
    Ok(())
}

async fn symlink(copier: &mut Copier, from: &Path, to: &str) -> Result<(), Failure> {
    let points = fs::read_link(from).await.map_err(io_error(from.display().to_string()))?;
    let Some(points) = points.to_str() else {
        copier.copied.skipped.push(from.to_string_lossy().into_owned());
        return Ok(());
    };
    // A second copy of the same tree replaces the first.
    match copier.client.stat(copier.id, to).await {
        Ok(entry) if entry.is_dir => {}
        Ok(_) => copier.client.remove_path(copier.id, to, false).await?,
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    copier.client.symlink(copier.id, points, to).await?;
    copier.copied.symlinks += 1;
    Ok(())
}

async fn file(copier: &mut Copier, from: &Path, to: &str, mode: u32) -> Result<(), Failure> {
    copier.say(to);
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
