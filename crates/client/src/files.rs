//! Files in a sandbox.

use crate::{
    error::{Error, Result},
    sandboxes::path as at,
    transport::Client,
};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream::BoxStream};
use keiki_types::{
    SandboxId,
    api::{ErrorBody, FsChange, FsEntry, FsEvent, FsList, FsUnpacked, FsWritten},
};
use reqwest::{Body, Method};

/// A file being read.
pub struct FileReader {
    /// Size, if known.
    pub size: Option<u64>,
    pub chunks: BoxStream<'static, Result<Bytes>>,
}

/// How to unpack an archive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacking {
    /// Keep owners, by number; otherwise root owns everything.
    pub owners: bool,
    /// Unpack the contents of the top directory, not the directory itself.
    pub strip_top: bool,
}

impl Client {
    /// Reads a file of any size.
    pub async fn read_file(&self, id: SandboxId, path: &str) -> Result<FileReader> {
        let response = self.send(self.request(Method::GET, &at(id, "/fs")).query(&[("path", path)])).await?;
        let size = response.content_length();
        let chunks = response.bytes_stream().map(|chunk| chunk.map_err(Error::Transport)).boxed();
        Ok(FileReader { size, chunks })
    }

    /// Writes a file of any size, atomically. Creates missing parents.
    pub async fn write_file(
        &self,
        id: SandboxId,
        path: &str,
        mode: Option<u32>,
        data: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    ) -> Result<FsWritten> {
        self.put(id, path, mode, Body::wrap_stream(data)).await
    }

    /// Writes a file from memory.
    pub async fn write_bytes(
        &self,
        id: SandboxId,
        path: &str,
        mode: Option<u32>,
        data: impl Into<Bytes>,
    ) -> Result<FsWritten> {
        self.put(id, path, mode, Body::from(data.into())).await
    }

    async fn put(&self, id: SandboxId, path: &str, mode: Option<u32>, body: Body) -> Result<FsWritten> {
        let mut query = vec![("path", path.to_owned())];
        query.extend(mode.map(|mode| ("mode", format!("{mode:04o}"))));
        let request = self.request(Method::PUT, &at(id, "/fs")).query(&query);
        self.json(request.header("content-type", "application/octet-stream").body(body)).await
    }

    /// Reads a file or directory as a tar stream.
    pub async fn read_archive(&self, id: SandboxId, path: &str) -> Result<BoxStream<'static, Result<Bytes>>> {
        let request = self.request(Method::GET, &at(id, "/archive")).query(&[("path", path)]);
        self.bytes(request).await
    }

    /// Unpacks a tar stream into a directory. A refused stream leaves nothing behind.
    pub async fn write_archive(
        &self,
        id: SandboxId,
        path: &str,
        how: Unpacking,
        data: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    ) -> Result<FsUnpacked> {
        let flags = [("owners", how.owners), ("strip_top", how.strip_top)];
        let request = self.request(Method::PUT, &at(id, "/archive")).query(&[("path", path)]).query(&flags);
        self.json(request.header("content-type", "application/x-tar").body(Body::wrap_stream(data))).await
    }

    /// Watches a path, and everything below it if `recursive`. The first event is `ready`; the
    /// stream ends when the path is removed.
    pub async fn watch(
        &self,
        id: SandboxId,
        path: &str,
        recursive: bool,
    ) -> Result<BoxStream<'static, Result<FsEvent>>> {
        let request = self.request(Method::GET, &at(id, "/fs/watch"));
        let request = request.query(&[("path", path)]).query(&[("recursive", recursive)]);
        let events = self.events_of(request).await?.map(|event| {
            let event = event?;
            let unclear =
                |error: serde_json::Error| Error::Protocol(format!("{} event: {error}", event.event));
            if event.event == "error" {
                let body: ErrorBody = serde_json::from_str(&event.data).map_err(unclear)?;
                return Err(Error::Command(body.error));
            }
            serde_json::from_str(&event.data).map_err(unclear)
        });
        Ok(events.boxed())
    }

    /// The entries of a directory, sorted by name.
    pub async fn list_dir(&self, id: SandboxId, path: &str) -> Result<Vec<FsEntry>> {
        let request = self.request(Method::GET, &at(id, "/fs/dir")).query(&[("path", path)]);
        self.json::<FsList>(request).await.map(|list| list.entries)
    }

    pub async fn stat(&self, id: SandboxId, path: &str) -> Result<FsEntry> {
        self.json(self.request(Method::GET, &at(id, "/fs/stat")).query(&[("path", path)])).await
    }

    /// Creates a directory and its parents.
    pub async fn mkdir(&self, id: SandboxId, path: &str, mode: Option<u32>) -> Result<()> {
        let mode = mode.map(|mode| format!("{mode:04o}"));
        self.change(id, "mkdir", FsChange { path: path.into(), mode, recursive: true, ..Default::default() })
            .await
    }

    /// Gives a file another name.
    pub async fn rename(&self, id: SandboxId, from: &str, to: &str) -> Result<()> {
        let change = FsChange { path: to.into(), from: Some(from.into()), ..Default::default() };
        self.change(id, "rename", change).await
    }

    /// Removes a file, or a directory; `recursive`: with what is inside.
    pub async fn remove_path(&self, id: SandboxId, path: &str, recursive: bool) -> Result<()> {
        self.change(id, "remove", FsChange { path: path.into(), recursive, ..Default::default() }).await
    }

    /// Sets permission bits.
    pub async fn chmod(&self, id: SandboxId, path: &str, mode: u32) -> Result<()> {
        let change = FsChange { path: path.into(), mode: Some(format!("{mode:04o}")), ..Default::default() };
        self.change(id, "chmod", change).await
    }

    /// Makes a symlink at `path` that points at `target`.
    pub async fn symlink(&self, id: SandboxId, target: &str, path: &str) -> Result<()> {
        let change = FsChange { path: path.into(), target: Some(target.into()), ..Default::default() };
        self.change(id, "symlink", change).await
    }

    async fn change(&self, id: SandboxId, verb: &str, change: FsChange) -> Result<()> {
        self.send(self.request(Method::POST, &at(id, &format!("/fs/{verb}"))).json(&change)).await.map(drop)
    }
}
