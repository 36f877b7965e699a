//! Snapshots.

use crate::{error::Result, transport::Client};
use keiki_types::{
    SandboxId, SnapshotId,
    api::{CreateSandbox, Sandbox, Snapshot, SnapshotList},
};
use reqwest::Method;

impl Client {
    /// All snapshots, or those of one sandbox, newest first.
    pub async fn snapshots(&self, of: Option<SandboxId>) -> Result<Vec<Snapshot>> {
        let mut request = self.request(Method::GET, "/v1/snapshots");
        if let Some(id) = of {
            request = request.query(&[("sandbox_id", id.to_string())]);
        }
        self.json::<SnapshotList>(request).await.map(|list| list.snapshots)
    }

    /// One snapshot.
    pub async fn get_snapshot(&self, id: SnapshotId) -> Result<Snapshot> {
        self.get(&format!("/v1/snapshots/{id}")).await
    }

    /// Deletes a snapshot. Sandboxes restored from it keep running.
    pub async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        self.remove(&format!("/v1/snapshots/{id}")).await
    }

    /// Creates a sandbox from a snapshot; `request` has the other options.
    pub async fn restore(&self, id: SnapshotId, request: CreateSandbox) -> Result<Sandbox> {
        self.create(&CreateSandbox { template: None, from_snapshot: Some(id.to_string()), ..request }).await
    }
}
