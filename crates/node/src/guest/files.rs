//! Files in a sandbox.

use crate::{
    daemon::Node,
    error::{Error, Result},
    guest::refusal,
    guest::upload,
    sandbox::Use,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use keiki_api::{Files, Reading};
use keiki_protocol::guest::{
    ChmodRequest, Entry, FileChunk, MkdirRequest, PathRequest, ReadFileRequest, RemoveRequest, RenameRequest,
    SymlinkRequest, WriteChunk, WriteHeader, guest_client::GuestClient,
};
use keiki_types::{
    SandboxId,
    api::{FsChange, FsEntry},
};
use tokio::sync::OwnedSemaphorePermit;
use tonic::{Status, Streaming, transport::Channel};

/// Longest path that is passed on, as in Linux.
const PATH_MAX: usize = 4096;

#[async_trait]
impl Files for Node {
    async fn read_file(&self, id: SandboxId, path: &str) -> Result<Reading> {
        let path = checked(path)?;
        let using = self.inner.begin(id).await?;
        let held = using.live.guest.stream()?;
        let request = ReadFileRequest { path, offset: 0, limit: 0 };
        let read = using.call(request, |mut guest, request| async move { guest.read_file(request).await });
        let mut stream = read.await?;
        let first = match stream.message().await {
            Ok(first) => first.unwrap_or_default(),
            Err(status) => return Err(using.explain(refusal(&status)).await),
        };
        let (size, mode) = (first.size, first.mode);
        Ok(Reading { size, mode, chunks: contents(using, held, first, stream) })
    }

    async fn write_file(
        &self,
        id: SandboxId,
        path: &str,
        mode: Option<u32>,
        data: BoxStream<'static, Result<Bytes>>,
    ) -> Result<u64> {
        let header =
            WriteHeader { path: checked(path)?, mode: mode.unwrap_or(0), parents: true, user: String::new() };
        let using = self.inner.begin(id).await?;
        let _held = using.live.guest.stream()?;
        let mut first = Some(header);
        // An upload that breaks off is never committed.
        let (chunks, broken) = upload::messages(data, move |piece| WriteChunk {
            header: first.take(),
            commit: piece.is_none(),
            data: piece.unwrap_or_default(),
        });
        let written = using.live.guest.client().await.write_file(chunks).await;
        match broken.or(written)? {
            Ok(reply) => Ok(reply.into_inner().bytes),
            Err(status) => Err(using.explain(refusal(&status)).await),
        }
    }

    async fn list_dir(&self, id: SandboxId, path: &str) -> Result<Vec<FsEntry>> {
        let request = PathRequest { path: checked(path)? };
        let using = self.inner.begin(id).await?;
        let listed = using.call(request, |mut guest, request| async move { guest.list_dir(request).await });
        let mut entries: Vec<_> = listed.await?.entries.into_iter().map(entry).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    async fn stat(&self, id: SandboxId, path: &str) -> Result<FsEntry> {
        let request = PathRequest { path: checked(path)? };
        let using = self.inner.begin(id).await?;
        let found = using.call(request, |mut guest, request| async move { guest.stat(request).await });
        found.await.map(entry)
    }

    async fn mkdir(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let mode = mode(change.mode.as_deref())?.unwrap_or(0o755);
        let request = MkdirRequest { path: checked(&change.path)?, parents: change.recursive, mode };
        self.change(id, request, |mut guest, request| async move { guest.mkdir(request).await }).await
    }

    async fn rename(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let from = change.from.ok_or_else(|| Error::Invalid("from is required: the old path".into()))?;
        let request = RenameRequest { from: checked(&from)?, to: checked(&change.path)? };
        self.change(id, request, |mut guest, request| async move { guest.rename(request).await }).await
    }

    async fn remove(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let request = RemoveRequest { path: checked(&change.path)?, recursive: change.recursive };
        self.change(id, request, |mut guest, request| async move { guest.remove(request).await }).await
    }

    async fn chmod(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let mode = mode(change.mode.as_deref())?
            .ok_or_else(|| Error::Invalid("mode is required: octal text such as \"0755\"".into()))?;
        let request = ChmodRequest { path: checked(&change.path)?, mode };
        self.change(id, request, |mut guest, request| async move { guest.chmod(request).await }).await
    }

    async fn symlink(&self, id: SandboxId, change: FsChange) -> Result<()> {
        let target = change
            .target
            .ok_or_else(|| Error::Invalid("target is required: where the link points".into()))?;
        if target.is_empty() || target.contains('\0') {
            return Err(Error::Invalid("target must be a path".into()));
        }
        let request = SymlinkRequest { target: target.into(), link: checked(&change.path)? };
        self.change(id, request, |mut guest, request| async move { guest.symlink(request).await }).await
    }
}

impl Node {
    async fn change<R, T, F>(
        &self,
        id: SandboxId,
        request: R,
        send: impl Fn(GuestClient<Channel>, R) -> F,
    ) -> Result<()>
    where
        R: Clone,
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let using = self.inner.begin(id).await?;
        using.call(request, send).await.map(drop)
    }
}

/// Permission bits from octal text.
///
/// # Errors
/// 400 if it is something else.
pub fn mode(text: Option<&str>) -> Result<Option<u32>> {
    let Some(text) = text else { return Ok(None) };
    match u32::from_str_radix(text.trim_start_matches("0o"), 8) {
        Ok(bits) if bits <= 0o7777 => Ok(Some(bits)),
        _ => Err(Error::Invalid(format!("mode must be octal text such as \"0755\", not {text:?}"))),
    }
}

/// A path as the guest gets it.
///
/// # Errors
/// 400 if it is not absolute or too long.
pub fn checked(path: &str) -> Result<Bytes> {
    if !path.starts_with('/') || path.len() > PATH_MAX || path.contains('\0') {
        let shown: String = path.chars().take(80).collect();
        return Err(Error::Invalid(format!(
            "path must be absolute and have at most {PATH_MAX} bytes, not {shown:?}"
        )));
    }
    Ok(path.to_owned().into())
}

/// The rest of a file behind its first chunk. The use and its place among the streams last as long as the reading.
fn contents(
    using: Use,
    held: OwnedSemaphorePermit,
    first: FileChunk,
    stream: Streaming<FileChunk>,
) -> BoxStream<'static, Result<Bytes>> {
    let rest = futures::stream::unfold((using, held, stream), |(using, held, mut stream)| async move {
        let chunk = stream.message().await.transpose()?;
        let chunk = match chunk {
            Ok(chunk) => Ok(chunk.data),
            Err(status) => Err(using.explain(refusal(&status)).await),
        };
        Some((chunk, (using, held, stream)))
    });
    futures::stream::once(async move { Ok(first.data) }).chain(rest).boxed()
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
    use super::{checked, mode};

    #[test]
    fn paths_and_modes_are_checked() {
        assert!(checked("/a b/é\n").is_ok());
        for bad in ["", "relative", "/a\0b"] {
            assert!(checked(bad).is_err(), "{bad:?}");
        }
        assert_eq!(mode(Some("0755")).ok(), Some(Some(0o755)));
        assert_eq!(mode(None).ok(), Some(None));
        for bad in ["", "8", "rwx", "10000", "-1"] {
            assert!(mode(Some(bad)).is_err(), "{bad:?}");
        }
    }
}
