//! Sandboxes.

use crate::{error::Result, transport::Client};
use futures::{StreamExt, stream::BoxStream};
use keiki_types::{
    SandboxId,
    api::{
        CreateSandbox, ForkSandbox, ForkTree, Forked, ForkedTree, Lifecycle, Promote, Promoted, Sandbox,
        SandboxList, SetLifecycle, Snapshot, Version,
    },
};
use reqwest::{Method, RequestBuilder};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogStream {
    Both,
    Stdout,
    Stderr,
}

pub(crate) fn path(id: SandboxId, rest: &str) -> String {
    format!("/v1/sandboxes/{id}{rest}")
}

impl Client {
    /// Creates a sandbox. Returns once it is ready.
    pub async fn create(&self, request: &CreateSandbox) -> Result<Sandbox> {
        self.post_patiently("/v1/sandboxes", request).await
    }

    /// All sandboxes, newest first, with their memory use if `memory`.
    pub async fn list(&self, memory: bool) -> Result<Vec<Sandbox>> {
        let path = if memory { "/v1/sandboxes?memory=true" } else { "/v1/sandboxes" };
        self.get::<SandboxList>(path).await.map(|list| list.items)
    }

    /// One sandbox, with its memory use.
    pub async fn sandbox(&self, id: SandboxId) -> Result<Sandbox> {
        self.get(&path(id, "")).await
    }

    /// Deletes a sandbox.
    pub async fn delete(&self, id: SandboxId) -> Result<()> {
        self.remove(&path(id, "")).await
    }

    /// Forks a running sandbox: creates all children or none.
    pub async fn fork(&self, id: SandboxId, request: &ForkSandbox) -> Result<Forked> {
        self.post_patiently(&path(id, "/fork"), request).await
    }

    /// Forks a running sandbox; the children carry the id of the tree, for [`Client::promote`].
    pub async fn fork_tree(&self, id: SandboxId, request: &ForkTree) -> Result<ForkedTree> {
        self.post_patiently(&path(id, "/fork-tree"), request).await
    }

    /// Promotes one child of a fork tree.
    pub async fn promote(&self, id: SandboxId, request: &Promote) -> Result<Promoted> {
        self.post(&path(id, "/promote"), request).await
    }

    /// Pauses a sandbox, keeping it in memory.
    pub async fn pause(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/pause")).await
    }

    /// Resumes a paused sandbox.
    pub async fn resume(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/resume")).await
    }

    /// Saves a sandbox to disk and stops it.
    pub async fn hibernate(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/hibernate")).await
    }

    /// Wakes a hibernated sandbox under the same id.
    pub async fn wake(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/wake")).await
    }

    /// Takes a snapshot of a running sandbox. Returns once it is durable.
    pub async fn snapshot(&self, id: SandboxId) -> Result<Snapshot> {
        self.act(&path(id, "/snapshots")).await
    }

    /// TTL, persistence and idle time.
    pub async fn lifecycle(&self, id: SandboxId) -> Result<Lifecycle> {
        self.get(&path(id, "/lifecycle")).await
    }

    /// Changes TTL or persistence.
    pub async fn set_lifecycle(&self, id: SandboxId, request: &SetLifecycle) -> Result<Lifecycle> {
        self.json(self.request(Method::PATCH, &path(id, "/lifecycle")).json(request)).await
    }

    /// The log so far, as bytes: it need not be text.
    pub async fn logs(
        &self,
        id: SandboxId,
        stream: LogStream,
    ) -> Result<BoxStream<'static, Result<bytes::Bytes>>> {
        self.bytes(self.logs_request(id, stream, false)).await
    }

    /// The log so far and new output, line by line.
    pub async fn follow_logs(
        &self,
        id: SandboxId,
        stream: LogStream,
    ) -> Result<BoxStream<'static, Result<String>>> {
        #[derive(Deserialize)]
        struct Line {
            line: String,
        }
        let lines = self.events_of(self.logs_request(id, stream, true)).await?.map(|event| {
            let data = event?.data;
            Ok(serde_json::from_str::<Line>(&data).map_or(data, |line| line.line))
        });
        Ok(lines.boxed())
    }

    fn logs_request(&self, id: SandboxId, stream: LogStream, follow: bool) -> RequestBuilder {
        let request = self.request(Method::GET, &path(id, "/logs"));
        request.query(&[("stream", stream)]).query(&[("follow", follow)])
    }

    /// Version and engine of the node.
    pub async fn version(&self) -> Result<Version> {
        self.get("/v1/version").await
    }
}
