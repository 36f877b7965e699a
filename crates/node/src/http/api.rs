//! What the HTTP layer asks of a node, as a trait, so that the layer is tested without a host.

use crate::{
    Node, Result,
    dial::Dialed,
    exec::{Session, known::From},
    files::Reading,
    key::Secret,
    metrics::Metrics,
    once::Once,
    preview::Previews,
    trees::Unpacking,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
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

/// Writes each verb once: as a method of the trait and as the call of [`Node`]'s method of that name.
macro_rules! verbs {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {
        /// The verbs of `/v1`. [`Node`] says what each does.
        #[async_trait]
        pub(super) trait Api: Send + Sync {
            fn version(&self) -> Version;
            fn authorize(&self, key: Option<&str>) -> Result<()>;
            /// Where requests are counted.
            fn counters(&self) -> Metrics;
            /// Who may look at what of a sandbox.
            fn previews(&self) -> Previews;
            /// What digests of named requests are made with.
            fn request_key(&self) -> Secret;
            $(async fn $name(&self, $($arg: $type),*) -> Result<$answer>;)*
        }

        #[async_trait]
        impl Api for Node {
            fn version(&self) -> Version {
                Node::version(self)
            }

            fn authorize(&self, key: Option<&str>) -> Result<()> {
                Node::authorize(self, key)
            }

            fn counters(&self) -> Metrics {
                self.inner.metrics.clone()
            }

            fn previews(&self) -> Previews {
                self.inner.previews.clone()
            }

            fn request_key(&self) -> Secret {
                self.inner.request_key
            }

            $(async fn $name(&self, $($arg: $type),*) -> Result<$answer> {
                Node::$name(self, $($arg),*).await
            })*
        }
    };
}

verbs! {
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
    fn ports(id: SandboxId) -> Vec<Port>;
    fn metrics() -> String;
    fn events(of: Option<SandboxId>, since: Option<u64>, limit: Option<usize>) -> Vec<Event>;
    fn follow_events(of: Option<SandboxId>, since: Option<u64>) -> BoxStream<'static, Event>;
    fn console(id: SandboxId, limit: usize) -> Bytes;
    fn snapshot(id: SandboxId, once: Option<Once>) -> Snapshot;
    fn snapshots(of: Option<SandboxId>) -> Vec<Snapshot>;
    fn get_snapshot(id: SnapshotId) -> Snapshot;
    fn delete_snapshot(id: SnapshotId) -> ();
    fn exec(id: SandboxId, request: ExecRequest, pty: Option<(u32, u32)>) -> Session;
    fn start_exec(id: SandboxId, request: StartExec) -> Exec;
    fn execs(id: SandboxId) -> Vec<Exec>;
    fn get_exec(id: SandboxId, exec: &str) -> Exec;
    fn attach_exec(id: SandboxId, exec: &str, from: From) -> Session;
    fn signal_exec(id: SandboxId, exec: &str, signal: Signal) -> ();
    fn write_exec(id: SandboxId, exec: &str, data: BoxStream<'static, Result<Bytes>>, eof: bool) -> u64;
    fn remove_exec(id: SandboxId, exec: &str) -> ();
    fn pack(id: SandboxId, path: &str) -> BoxStream<'static, Result<Bytes>>;
    fn unpack(id: SandboxId, path: &str, how: Unpacking, data: BoxStream<'static, Result<Bytes>>) -> FsUnpacked;
    fn watch(id: SandboxId, path: &str, recursive: bool) -> BoxStream<'static, Result<FsEvent>>;
    fn dial(id: SandboxId, port: u16) -> Dialed;
    fn read_file(id: SandboxId, path: &str) -> Reading;
    fn write_file(id: SandboxId, path: &str, mode: Option<u32>, data: BoxStream<'static, Result<Bytes>>) -> u64;
    fn list_dir(id: SandboxId, path: &str) -> Vec<FsEntry>;
    fn stat(id: SandboxId, path: &str) -> FsEntry;
    fn mkdir(id: SandboxId, change: FsChange) -> ();
    fn rename(id: SandboxId, change: FsChange) -> ();
    fn remove(id: SandboxId, change: FsChange) -> ();
    fn chmod(id: SandboxId, change: FsChange) -> ();
    fn symlink(id: SandboxId, change: FsChange) -> ();
    fn templates() -> Vec<Template>;
    fn get_template(name: &TemplateName) -> Template;
    fn delete_template(name: &TemplateName) -> ();
    fn build_template(request: BuildTemplate) -> Build;
    fn builds() -> Vec<Build>;
    fn get_build(id: &str) -> Build;
    fn build_log(id: &str) -> BoxStream<'static, String>;
}
