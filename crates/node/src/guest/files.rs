//! Files in a sandbox.

use crate::{
    daemon::Node,
    error::{Error, Result},
    guest::{download::download, upload},
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream};
use keiki_api::{ByteStream, Files, Reading, request};
use keiki_protocol::guest::{
    ChmodRequest, Entry, FileChunk, MkdirRequest, PathRequest, ReadFileRequest, RemoveRequest, RenameRequest,
    SymlinkRequest, WriteChunk, WriteHeader,
};
use keiki_types::{
    SandboxId,
    api::{FsChange, FsEntry},
};

/// Longest path that is passed on, as in Linux.
const PATH_MAX: usize = 4096;

#[async_trait]
impl Files for Node {
    async fn read_file(&self, id: SandboxId, path: &str) -> Result<Reading> {
        let path = checked(path)?;
        let using = self.inner.begin(id).await?;
        let request = ReadFileRequest { path, offset: 0, limit: 0 };
        let read =
            download(using, request, |mut guest, request| async move { guest.read_file(request).await });
        let mut chunks = read.await?;
        let FileChunk { size, mode, data } = chunks.next().await.transpose()?.unwrap_or_default();
        let rest = chunks.map(|chunk| Ok(chunk?.data));
        Ok(Reading { size, mode, chunks: stream::iter([Ok(data)]).chain(rest).boxed() })
    }

    async fn write_file(
        &self,
        id: SandboxId,
        path: &str,
        mode: Option<u32>,
        data: ByteStream,
    ) -> Result<u64> {
        let header =
            WriteHeader { path: checked(path)?, mode: mode.unwrap_or(0), parents: true, user: String::new() };
        let using = self.inner.begin(id).await?;
        let _stream = using.live.guest.stream()?;
        let mut first = Some(header);
        // An upload that breaks off is never committed.
        let chunk = move |piece: Option<Bytes>| WriteChunk {
            header: first.take(),
            commit: piece.is_none(),
            data: piece.unwrap_or_default(),
        };
        let (chunks, broken) = upload::messages(data, chunk);
        let answer = using.live.guest.client().await.write_file(chunks).await;
        Ok(upload::finish(&using, broken, answer).await?.bytes)
    }

    async fn list_dir(&self, id: SandboxId, path: &str) -> Result<Vec<FsEntry>> {
        let request = PathRequest { path: checked(path)? };
        let listed = self.ask(id, request, |mut guest, request| async move { guest.list_dir(request).await });
        let mut entries: Vec<_> = listed.await?.entries.into_iter().map(entry).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    async fn stat(&self, id: SandboxId, path: &str) -> Result<FsEntry> {
        let request = PathRequest { path: checked(path)? };
        self.ask(id, request, |mut guest, request| async move { guest.stat(request).await }).await.map(entry)
    }

    async fn mkdir(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let mode = change.mode.as_deref().map_or(Ok(0o755), request::mode)?;
        let request = MkdirRequest { path: checked(&change.path)?, parents: change.recursive, mode };
        self.ask(id, request, |mut guest, request| async move { guest.mkdir(request).await }).await.map(drop)
    }

    async fn rename(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let from = checked(&change.from.unwrap_or_default())?;
        let request = RenameRequest { from, to: checked(&change.path)? };
        self.ask(id, request, |mut guest, request| async move { guest.rename(request).await }).await.map(drop)
    }

    async fn remove(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let request = RemoveRequest { path: checked(&change.path)?, recursive: change.recursive };
        self.ask(id, request, |mut guest, request| async move { guest.remove(request).await }).await.map(drop)
    }

    async fn chmod(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let mode = request::mode(&change.mode.unwrap_or_default())?;
        let request = ChmodRequest { path: checked(&change.path)?, mode };
        self.ask(id, request, |mut guest, request| async move { guest.chmod(request).await }).await.map(drop)
    }

    async fn symlink(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let request =
            SymlinkRequest { target: change.target.unwrap_or_default().into(), link: checked(&change.path)? };
        self.ask(id, request, |mut guest, request| async move { guest.symlink(request).await })
            .await
            .map(drop)
    }
}

/// A path as the guest gets it.
pub fn checked(path: &str) -> Result<Bytes> {
    if !path.starts_with('/') || path.len() > PATH_MAX || path.contains('\0') {
        let shown: String = path.chars().take(80).collect();
        return Err(Error::Invalid(format!(
            "path must be absolute and have at most {PATH_MAX} bytes, not {shown:?}"
        )));
    }
    Ok(path.to_owned().into())
}

fn entry(entry: Entry) -> FsEntry {
    let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
    FsEntry {
        name: text(&entry.name),
        path: text(&entry.path),
        is_dir: entry.kind == "dir",
        size: entry.size,
        mode: format!("{:04o}", entry.mode),
        mtime: entry.mtime_unix,
        target: (entry.kind == "symlink").then(|| text(&entry.target)),
        kind: entry.kind,
        uid: entry.uid,
        gid: entry.gid,
    }
}

#[cfg(test)]
mod tests {
    use super::checked;

    #[test]
    fn paths_are_checked() {
        assert!(checked("/a b/é\n").is_ok());
        for bad in ["", "relative", "/a\0b"] {
            assert!(checked(bad).is_err(), "{bad:?}");
        }
    }
}
