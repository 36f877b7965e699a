//! The node itself.

use crate::{
    error::{Error, Result},
    exec::Session,
    files::Reading,
};
use bytes::Bytes;
use futures::stream::BoxStream;
use keiki_types::{
    EngineKind, SandboxId, SnapshotId, TemplateName,
    api::{
        Build, BuildTemplate, CreateSandbox, ExecRequest, ForkSandbox, Forked, FsChange, FsEntry, Lifecycle,
        Promote, Promoted, Sandbox, SetLifecycle, Snapshot, Template, Version,
    },
};
use std::{path::PathBuf, sync::Arc};

/// What a node is told when it starts.
#[derive(Debug, Clone)]
pub struct Config {
    /// Everything durable.
    pub data_dir: PathBuf,
    /// Sockets.
    pub run_dir: PathBuf,
    /// Address of the API, e.g. `127.0.0.1:7777`; port 0 picks a free one.
    pub listen: String,
    /// Keys that may use the API. None: any key, which is allowed on loopback only.
    pub api_keys: Vec<String>,
    /// Which engine; None probes.
    pub engine: Option<EngineKind>,
    /// Network of the slots, e.g. `10.200.0.0/16`.
    pub slot_range: String,
    /// Where the guest agent binary is; it goes into the initramfs of templates.
    pub guest_binary: PathBuf,
}

/// The daemon, without HTTP. Cheap to clone.
#[derive(Clone)]
pub struct Node {
    #[allow(dead_code)]
    inner: Arc<()>,
}

fn unfinished<T>() -> Result<T> {
    Err(Error::NotFound("unfinished".into()))
}

#[allow(clippy::unused_async, unused_variables, missing_docs, clippy::missing_errors_doc)]
impl Node {
    pub async fn start(config: Config) -> Result<Self> {
        unfinished()
    }
    /// Stops serving; running machines stay.
    pub async fn stop(&self) {}
    pub fn version(&self) -> Version {
        Version { version: String::new(), engine: String::new() }
    }
    /// May this key (None: none was sent) use the API?
    pub fn authorize(&self, key: Option<&str>) -> Result<()> {
        Ok(())
    }

    pub async fn create(&self, request: CreateSandbox) -> Result<Sandbox> {
        unfinished()
    }
    /// Newest first. `memory`: fill in memory use.
    pub async fn list(&self, memory: bool) -> Result<Vec<Sandbox>> {
        unfinished()
    }
    pub async fn get(&self, id: SandboxId) -> Result<Sandbox> {
        unfinished()
    }
    pub async fn delete(&self, id: SandboxId) -> Result<()> {
        unfinished()
    }
    pub async fn fork(&self, id: SandboxId, request: ForkSandbox) -> Result<Forked> {
        unfinished()
    }
    pub async fn promote(&self, id: SandboxId, request: Promote) -> Result<Promoted> {
        unfinished()
    }
    pub async fn pause(&self, id: SandboxId) -> Result<Sandbox> {
        unfinished()
    }
    pub async fn resume(&self, id: SandboxId) -> Result<Sandbox> {
        unfinished()
    }
    pub async fn hibernate(&self, id: SandboxId) -> Result<Sandbox> {
        unfinished()
    }
    pub async fn wake(&self, id: SandboxId) -> Result<Sandbox> {
        unfinished()
    }
    pub async fn lifecycle(&self, id: SandboxId) -> Result<Lifecycle> {
        unfinished()
    }
    pub async fn set_lifecycle(&self, id: SandboxId, request: SetLifecycle) -> Result<Lifecycle> {
        unfinished()
    }
    /// The last `limit` bytes of the guest's console.
    pub async fn console(&self, id: SandboxId, limit: usize) -> Result<Bytes> {
        unfinished()
    }

    pub async fn snapshot(&self, id: SandboxId) -> Result<Snapshot> {
        unfinished()
    }
    pub async fn snapshots(&self, of: Option<SandboxId>) -> Result<Vec<Snapshot>> {
        unfinished()
    }
    pub async fn get_snapshot(&self, id: SnapshotId) -> Result<Snapshot> {
        unfinished()
    }
    pub async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        unfinished()
    }

    /// Starts a command. `pty`: columns and rows.
    pub async fn exec(
        &self,
        id: SandboxId,
        request: ExecRequest,
        pty: Option<(u32, u32)>,
    ) -> Result<Session> {
        unfinished()
    }

    pub async fn read_file(&self, id: SandboxId, path: &str) -> Result<Reading> {
        unfinished()
    }
    /// Makes missing parents; the old file stays until the new one is whole.
    pub async fn write_file(
        &self,
        id: SandboxId,
        path: &str,
        mode: Option<u32>,
        data: BoxStream<'static, Result<Bytes>>,
    ) -> Result<u64> {
        unfinished()
    }
    pub async fn list_dir(&self, id: SandboxId, path: &str) -> Result<Vec<FsEntry>> {
        unfinished()
    }
    pub async fn stat(&self, id: SandboxId, path: &str) -> Result<FsEntry> {
        unfinished()
    }
    pub async fn mkdir(&self, id: SandboxId, change: FsChange) -> Result<()> {
        unfinished()
    }
    pub async fn rename(&self, id: SandboxId, change: FsChange) -> Result<()> {
        unfinished()
    }
    pub async fn remove(&self, id: SandboxId, change: FsChange) -> Result<()> {
        unfinished()
    }
    pub async fn chmod(&self, id: SandboxId, change: FsChange) -> Result<()> {
        unfinished()
    }
    pub async fn symlink(&self, id: SandboxId, change: FsChange) -> Result<()> {
        unfinished()
    }

    pub async fn templates(&self) -> Result<Vec<Template>> {
        unfinished()
    }
    pub async fn get_template(&self, name: &TemplateName) -> Result<Template> {
        unfinished()
    }
    pub async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        unfinished()
    }
    /// Starts a build, or returns the one that is running for this template.
    pub async fn build_template(&self, request: BuildTemplate) -> Result<Build> {
        unfinished()
    }
    pub async fn builds(&self) -> Result<Vec<Build>> {
        unfinished()
    }
    pub async fn get_build(&self, id: &str) -> Result<Build> {
        unfinished()
    }
    /// Log lines of a build, from its start to its end.
    pub async fn build_log(&self, id: &str) -> Result<BoxStream<'static, String>> {
        unfinished()
    }
}
