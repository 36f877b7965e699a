//! Snapshots and restores.

use super::{
    pick::Metric,
    run::{Bench, REST, Samples, first_event, ms},
};
use crate::exit::Failure;
use keiki_client::SnapshotId;
use serde_json::{Value, json};
use std::time::Instant;

impl Bench<'_> {
    pub(super) async fn snapshots(&self) -> Result<Samples, Failure> {
        let id = self.warm().await?;
        let mut samples = Samples::default();
        for at in 0..self.size.n {
            self.say("snapshot", at, self.size.n);
            tokio::time::sleep(REST).await;
            let start = Instant::now();
            let snapshot = self.client.snapshot(id).await?;
            samples.add(Metric::Snapshot, &json!({}), [ms(start)]);
            self.client.delete_snapshot(snapshot.id).await?;
        }
        self.client.delete(id).await?;
        Ok(samples)
    }

    /// Restores a snapshot whose sandbox is gone, so that its memory is not mapped.
    pub(super) async fn restores(&self, params: Value) -> Result<Samples, Failure> {
        let id = self.warm().await?;
        let snapshot = self.client.snapshot(id).await?.id;
        self.client.delete(id).await?;
        let mut samples = Samples::default();
        for at in 0..self.size.n {
            self.say("restore", at, self.size.n);
            self.rest(&params).await?;
            samples.add(Metric::RestoreFirstExec, &params, [self.restore(snapshot).await?]);
        }
        self.client.delete_snapshot(snapshot).await?;
        Ok(samples)
    }

    async fn restore(&self, snapshot: SnapshotId) -> Result<f64, Failure> {
        let start = Instant::now();
        let sandbox = self.client.restore(snapshot, self.owned.request()).await?;
        first_event(self.client, sandbox.id).await?;
        let took = ms(start);
        self.client.delete(sandbox.id).await?;
        Ok(took)
    }
}
