//! Sandboxes: the verbs of their life.

use crate::{
    error::{Error, Result},
    sse,
    transport::Client,
};
use futures::{StreamExt, stream::BoxStream};
use keiki_types::{
    SandboxId,
    api::{
        CreateSandbox, ForkSandbox, ForkTree, Forked, ForkedTree, Lifecycle, Promote, Promoted, Sandbox,
        SandboxList, SetLifecycle, Snapshot, Version,
    },
};
use reqwest::Method;
use serde::Deserialize;

/// Which part of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogStream {
    /// Everything.
    #[default]
    Both,
    /// What went to standard output.
    Stdout,
    /// What went to standard error.
    Stderr,
}

impl LogStream {
    fn as_str(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

pub(crate) fn path(id: SandboxId, rest: &str) -> String {
    format!("/v1/sandboxes/{id}{rest}")
}

#[allow(clippy::missing_errors_doc)] // Each fails as `Error` says; nothing differs per verb.
impl Client {
    /// Makes a sandbox. Returns once it is released to its user.
    pub async fn create(&self, request: &CreateSandbox) -> Result<Sandbox> {
        self.post_patiently("/v1/sandboxes", request).await
    }

    /// All sandboxes, newest first. `memory`: with their memory use.
    pub async fn list(&self, memory: bool) -> Result<Vec<Sandbox>> {
        let path = if memory { "/v1/sandboxes?memory=true" } else { "/v1/sandboxes" };
        self.get::<SandboxList>(path).await.map(|list| list.items)
    }

    /// One sandbox, with its memory use.
    pub async fn sandbox(&self, id: SandboxId) -> Result<Sandbox> {
        self.get(&path(id, "")).await
    }

    /// Ends a sandbox and frees everything of it.
    pub async fn delete(&self, id: SandboxId) -> Result<()> {
        self.remove(&path(id, "")).await
    }

    /// Branches children off a running sandbox; it goes on. All of them or none.
    pub async fn fork(&self, id: SandboxId, request: &ForkSandbox) -> Result<Forked> {
        self.post_patiently(&path(id, "/fork"), request).await
    }

    /// Like fork; the children carry the id of the fan-out, for [`Client::promote`].
    pub async fn fork_tree(&self, id: SandboxId, request: &ForkTree) -> Result<ForkedTree> {
        self.post_patiently(&path(id, "/fork-tree"), request).await
    }

    /// Chooses one child of a fan-out.
    pub async fn promote(&self, id: SandboxId, request: &Promote) -> Result<Promoted> {
        self.post(&path(id, "/promote"), request).await
    }

    /// Stops its vCPUs, keeps it in memory.
    pub async fn pause(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/pause")).await
    }

    /// Lets a paused sandbox go on.
    pub async fn resume(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/resume")).await
    }

    /// Stores it and stops it.
    pub async fn hibernate(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/hibernate")).await
    }

    /// Brings a hibernated sandbox back under the same id.
    pub async fn wake(&self, id: SandboxId) -> Result<Sandbox> {
        self.act(&path(id, "/wake")).await
    }

    /// Takes a snapshot; the sandbox goes on. Returns once the snapshot is durable.
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

    /// The log so far, as bytes: a guest's console is not always text.
    pub async fn logs(
        &self,
        id: SandboxId,
        stream: LogStream,
    ) -> Result<BoxStream<'static, Result<bytes::Bytes>>> {
        let query = [("stream", stream.as_str()), ("follow", "false")];
        let response = self.send(self.request(Method::GET, &path(id, "/logs")).query(&query)).await?;
        Ok(response.bytes_stream().map(|chunk| chunk.map_err(Error::Transport)).boxed())
    }

    /// The log so far and what comes, line by line.
    pub async fn follow_logs(
        &self,
        id: SandboxId,
        stream: LogStream,
    ) -> Result<BoxStream<'static, Result<String>>> {
        #[derive(Deserialize)]
        struct Line {
            line: String,
        }
        let query = [("stream", stream.as_str()), ("follow", "true")];
        let request = self.request(Method::GET, &path(id, "/logs")).query(&query);
        let response = self.send(request.header("accept", "text/event-stream")).await?;
        let lines = sse::events(response.bytes_stream()).map(|event| {
            let data = event?.data;
            Ok(serde_json::from_str::<Line>(&data).map_or(data, |line| line.line))
        });
        Ok(lines.boxed())
    }

    /// What the node is.
    pub async fn version(&self) -> Result<Version> {
        self.get("/v1/version").await
    }
}
