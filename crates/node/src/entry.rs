//! Implements the API trait for the node. A verb that changes something runs to its end in
//! [`Node::run`]; one with an idempotency key runs once (`once`).

use crate::{
    daemon::{Inner, Node},
    error::{Error, Result},
    once::Once,
    records::SnapshotRecord,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use keiki_api::{Sandboxes, Templates, request as checks};
use keiki_types::{
    SandboxId, SnapshotId, Status, TemplateName,
    api::{
        Build, BuildTemplate, CreateSandbox, ForkSandbox, Forked, Lifecycle, Promote, Promoted, Sandbox,
        SetLifecycle, Snapshot, Template,
    },
};
use std::{collections::BTreeMap, sync::Arc};

impl Node {
    /// Runs a verb to its end even if its caller disconnects.
    async fn run<T, F>(&self, verb: impl FnOnce(Arc<Inner>) -> F + Send) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.inner.to_the_end(verb(Arc::clone(&self.inner))).await
    }
}

#[async_trait]
impl Sandboxes for Node {
    async fn create(&self, request: CreateSandbox, once: Option<Once>) -> Result<Sandbox> {
        self.run(|node| async move {
            let verb = node.create(request, once.as_ref());
            node.once(once.as_ref(), verb, async |made| made_sandboxes(&node, &made)?.pop().ok_or_else(gone))
                .await
        })
        .await
    }

    async fn list(&self, memory: bool) -> Result<Vec<Sandbox>> {
        let sandboxes = self.inner.sandboxes.all();
        if memory {
            Ok(futures::future::join_all(sandboxes.iter().map(|sandbox| self.inner.view(sandbox))).await)
        } else {
            Ok(sandboxes.iter().map(|sandbox| sandbox.view()).collect())
        }
    }

    async fn get(&self, id: SandboxId) -> Result<Sandbox> {
        let sandbox = self.inner.sandboxes.get(id)?;
        Ok(self.inner.view(&sandbox).await)
    }

    async fn delete(&self, id: SandboxId) -> Result<()> {
        self.run(|node| async move { node.delete(id).await }).await
    }

    async fn fork(
        &self,
        id: SandboxId,
        request: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<Once>,
    ) -> Result<Forked> {
        self.run(move |node| async move {
            let verb = node.fork(id, request, labels, once.as_ref());
            let again = async |made: Vec<String>| {
                let children = made_sandboxes(&node, &made)?;
                let sandbox = children.first().cloned().ok_or_else(gone)?;
                // No times of the whole fork are kept; the first child's are those of its part.
                let timings = sandbox.timings.clone().unwrap_or_default();
                Ok(Forked { parent_id: id, sandbox, children, timings })
            };
            node.once(once.as_ref(), verb, again).await
        })
        .await
    }

    async fn promote(&self, id: SandboxId, request: Promote) -> Result<Promoted> {
        self.run(|node| async move { node.promote(id, request).await }).await
    }

    async fn pause(&self, id: SandboxId) -> Result<Sandbox> {
        self.run(|node| async move { node.pause(id).await }).await
    }

    async fn resume(&self, id: SandboxId) -> Result<Sandbox> {
        self.run(|node| async move { node.resume(id).await }).await
    }

    async fn hibernate(&self, id: SandboxId) -> Result<Sandbox> {
        self.run(|node| async move { node.hibernate(id).await }).await
    }

    async fn wake(&self, id: SandboxId) -> Result<Sandbox> {
        self.run(|node| async move { node.wake(id).await }).await
    }

    async fn lifecycle(&self, id: SandboxId) -> Result<Lifecycle> {
        let view = self.inner.sandboxes.get(id)?.view();
        Ok(Lifecycle {
            ttl_seconds: view.ttl_seconds,
            persistent: view.persistent,
            idle_seconds: view.idle_seconds,
        })
    }

    async fn set_lifecycle(&self, id: SandboxId, request: SetLifecycle) -> Result<Lifecycle> {
        let sandbox = self.inner.sandboxes.get(id)?;
        let verb = sandbox.verb.lock().await;
        let current = sandbox.record();
        if matches!(current.status, Status::Stopping | Status::Deleted) {
            return Err(Error::NotFound(format!("no sandbox {id}")));
        }
        if current.status == Status::Creating {
            return Err(Error::Conflict(format!("sandbox {id} is still being created")));
        }
        let ttl_seconds = checks::ttl(request.ttl_seconds, current.ttl_seconds)?;
        let record = sandbox.update(|record| {
            record.ttl_seconds = ttl_seconds;
            record.persistent = request.persistent.unwrap_or(record.persistent);
        });
        sandbox.touch();
        self.inner.journal.records.put(vec![record]).await?;
        drop(verb);
        self.lifecycle(id).await
    }

    async fn console(&self, id: SandboxId, limit: usize) -> Result<Bytes> {
        let sandbox = self.inner.sandboxes.get(id)?;
        match sandbox.live() {
            Some(live) => Ok(live.machine.console(limit).await.into()),
            None => Ok(crate::sandbox::console_of(&sandbox.record()).unwrap_or_default().into()),
        }
    }

    async fn snapshot(&self, id: SandboxId, once: Option<Once>) -> Result<Snapshot> {
        self.run(move |node| async move {
            let verb = node.snapshot(id, once.as_ref());
            let again = async |made: Vec<String>| {
                let id: SnapshotId = made.first().and_then(|id| id.parse().ok()).ok_or_else(gone)?;
                match node.snapshot_record(id).await {
                    Err(Error::NotFound(_)) => Err(gone()),
                    found => Ok(node.snapshot_view(&found?)),
                }
            };
            node.once(once.as_ref(), verb, again).await
        })
        .await
    }

    async fn snapshots(&self, of: Option<SandboxId>) -> Result<Vec<Snapshot>> {
        let mut records = self.inner.journal.records.all::<SnapshotRecord>().await?;
        records.retain(|record| of.is_none_or(|id| record.sandbox_id == id));
        records.sort_by_key(|record| std::cmp::Reverse(record.id));
        Ok(records.iter().map(|record| self.inner.snapshot_view(record)).collect())
    }

    async fn get_snapshot(&self, id: SnapshotId) -> Result<Snapshot> {
        Ok(self.inner.snapshot_view(&self.inner.snapshot_record(id).await?))
    }

    async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        self.run(|node| async move { node.delete_snapshot(id).await }).await
    }
}

#[async_trait]
impl Templates for Node {
    async fn templates(&self) -> Result<Vec<Template>> {
        self.inner.templates_view().await
    }

    async fn get_template(&self, name: &TemplateName) -> Result<Template> {
        let all = self.inner.templates_view().await?;
        let found = all.into_iter().find(|template| template.name == name.as_str());
        found.ok_or_else(|| Error::NotFound(format!("no template {name}")))
    }

    async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        let name = name.clone();
        self.run(|node| async move { node.delete_template(&name).await }).await
    }

    async fn build_template(&self, request: BuildTemplate) -> Result<Build> {
        self.inner.build_template(request).await
    }

    async fn builds(&self) -> Result<Vec<Build>> {
        Ok(self.inner.templates.builds())
    }

    async fn get_build(&self, id: &str) -> Result<Build> {
        let builds = self.inner.templates.builds();
        builds
            .into_iter()
            .find(|build| build.id == id)
            .ok_or_else(|| Error::NotFound(format!("no build {id}")))
    }

    async fn build_log(&self, id: &str) -> Result<BoxStream<'static, String>> {
        self.inner.templates.log(id).ok_or_else(|| Error::NotFound(format!("no build {id}")))
    }
}

/// The sandboxes that a request made, as they are now.
fn made_sandboxes(node: &Inner, made: &[String]) -> Result<Vec<Sandbox>> {
    let view = |id: &String| {
        let id: SandboxId = id.parse().map_err(|_| gone())?;
        Ok(node.sandboxes.get(id).map_err(|_| gone())?.view())
    };
    made.iter().map(view).collect()
}

fn gone() -> Error {
    Error::Conflict(
        "the request with this Idempotency-Key was carried out, and what it created has been deleted since: \
         send a new key to create another"
            .into(),
    )
}
