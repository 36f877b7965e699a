//! The node as its API: calls are passed on to the methods of [`Node`].

use crate::{Node, Result};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use keiki_api::{
    ByteStream, Commands, Dialed, Files, Host, Once, Ports, Previews, ReadFrom, Reading, Sandboxes, Secret,
    Session, Templates, Trees, Unpacking,
};
use keiki_types::{
    SandboxId, SnapshotId, TemplateName,
    api::{
        Build, BuildTemplate, CreateSandbox, Event, ExecRequest, ForkSandbox, Forked, FsChange, FsEntry,
        FsEvent, FsUnpacked, Lifecycle, Port, Promote, Promoted, Sandbox, SetLifecycle, Snapshot, Template,
        Version,
        execs::{Exec, Signal, StartExec},
    },
};
use std::collections::BTreeMap;

macro_rules! pass_on {
    ($trait:ident { $(fn $name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)* }) => {
        #[async_trait]
        impl $trait for Node {
            $(async fn $name(&self, $($arg: $type),*) -> Result<$answer> {
                Node::$name(self, $($arg),*).await
            })*
        }
    };
}

#[async_trait]
impl Host for Node {
    fn version(&self) -> Version {
        Node::version(self)
    }

    fn authorize(&self, key: Option<&str>) -> Result<()> {
        Node::authorize(self, key)
    }

    fn previews(&self) -> Previews {
        self.inner.previews.clone()
    }

    fn request_key(&self) -> Secret {
        self.inner.request_key
    }

    async fn metrics(&self) -> Result<String> {
        Node::metrics(self).await
    }

    async fn events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
        limit: Option<usize>,
    ) -> Result<Vec<Event>> {
        Node::events(self, of, since, limit).await
    }

    async fn follow_events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
    ) -> Result<BoxStream<'static, Event>> {
        Node::follow_events(self, of, since).await
    }
}

pass_on! { Sandboxes {
    fn create(request: CreateSandbox, once: Option<Once>) -> Sandbox;
    fn list(memory: bool) -> Vec<Sandbox>;
    fn get(id: SandboxId) -> Sandbox;
    fn delete(id: SandboxId) -> ();
    fn fork(id: SandboxId, request: ForkSandbox, labels: BTreeMap<String, String>, once: Option<Once>) -> Forked;
    fn promote(id: SandboxId, request: Promote) -> Promoted;
    fn pause(id: SandboxId) -> Sandbox;
    fn resume(id: SandboxId) -> Sandbox;
    fn hibernate(id: SandboxId) -> Sandbox;
    fn wake(id: SandboxId) -> Sandbox;
    fn lifecycle(id: SandboxId) -> Lifecycle;
    fn set_lifecycle(id: SandboxId, request: SetLifecycle) -> Lifecycle;
    fn console(id: SandboxId, limit: usize) -> Bytes;
    fn snapshot(id: SandboxId, once: Option<Once>) -> Snapshot;
    fn snapshots(of: Option<SandboxId>) -> Vec<Snapshot>;
    fn get_snapshot(id: SnapshotId) -> Snapshot;
    fn delete_snapshot(id: SnapshotId) -> ();
}}

pass_on! { Templates {
    fn templates() -> Vec<Template>;
    fn get_template(name: &TemplateName) -> Template;
    fn delete_template(name: &TemplateName) -> ();
    fn build_template(request: BuildTemplate) -> Build;
    fn builds() -> Vec<Build>;
    fn get_build(id: &str) -> Build;
    fn build_log(id: &str) -> BoxStream<'static, String>;
}}

pass_on! { Commands {
    fn exec(id: SandboxId, request: ExecRequest, pty: Option<(u32, u32)>) -> Session;
    fn start_exec(id: SandboxId, request: StartExec) -> Exec;
    fn execs(id: SandboxId) -> Vec<Exec>;
    fn get_exec(id: SandboxId, exec: &str) -> Exec;
    fn attach_exec(id: SandboxId, exec: &str, from: ReadFrom) -> Session;
    fn signal_exec(id: SandboxId, exec: &str, signal: Signal) -> ();
    fn write_exec(id: SandboxId, exec: &str, data: ByteStream, eof: bool) -> u64;
    fn remove_exec(id: SandboxId, exec: &str) -> ();
}}

pass_on! { Files {
    fn read_file(id: SandboxId, path: &str) -> Reading;
    fn write_file(id: SandboxId, path: &str, mode: Option<u32>, data: ByteStream) -> u64;
    fn list_dir(id: SandboxId, path: &str) -> Vec<FsEntry>;
    fn stat(id: SandboxId, path: &str) -> FsEntry;
    fn mkdir(id: SandboxId, change: FsChange) -> ();
    fn rename(id: SandboxId, change: FsChange) -> ();
    fn remove(id: SandboxId, change: FsChange) -> ();
    fn chmod(id: SandboxId, change: FsChange) -> ();
    fn symlink(id: SandboxId, change: FsChange) -> ();
}}

pass_on! { Trees {
    fn pack(id: SandboxId, path: &str) -> ByteStream;
    fn unpack(id: SandboxId, path: &str, how: Unpacking, data: ByteStream) -> FsUnpacked;
    fn watch(id: SandboxId, path: &str, recursive: bool) -> BoxStream<'static, Result<FsEvent>>;
}}

pass_on! { Ports {
    fn ports(id: SandboxId) -> Vec<Port>;
    fn dial(id: SandboxId, port: u16) -> Dialed;
}}
