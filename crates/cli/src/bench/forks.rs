//! Forks: how long the parent pauses, when the children are ready, and what it costs later.

use super::{
    guest::{Holder, MIB},
    pick::Metric,
    run::{Bench, REST, Samples, first_event, ms},
};
use crate::exit::Failure;
use futures::future::try_join_all;
use keiki_client::{
    SandboxId,
    api::{ForkSandbox, Forked},
};
use serde_json::json;
use std::time::Instant;

impl Bench<'_> {
    /// Dirties RAM before each fork, since each fork starts a new base; a spinning guest does so
    /// itself.
    pub(super) async fn forks(&self, guest: &str) -> Result<Samples, Failure> {
        let id = self.warm().await?;
        let holder = Holder::start(self.client, id, MIB).await?;
        if guest == "dirtying" {
            holder.spin().await?;
        }
        let (mut samples, params) = (Samples::default(), json!({"guest": guest, "dirty_mib": MIB}));
        for at in 0..self.size.n {
            self.say(&format!("fork, {guest} guest"), at, self.size.n);
            if guest == "idle" {
                holder.write().await?;
            }
            // Long enough for a spinning guest to touch most of it again.
            tokio::time::sleep(REST).await;
            let start = Instant::now();
            let forked = self.client.fork(id, &ForkSandbox::default()).await?;
            first_event(self.client, forked.sandbox.id).await?;
            samples.add(Metric::ForkFirstExec, &params, [ms(start)]);
            samples.add(Metric::ForkPause, &params, forked.timings.vcpu_pause_ms);
            samples.add(Metric::ForkUserPause, &params, forked.timings.user_pause_ms);
            self.client.delete(forked.sandbox.id).await?;
        }
        self.client.delete(id).await?;
        Ok(samples)
    }

    /// Forks many children at once; each continues what its parent did.
    pub(super) async fn forks_of(&self, many: usize, guest: &str) -> Result<Samples, Failure> {
        let id = self.warm().await?;
        if guest == "dirtying" {
            Holder::start(self.client, id, MIB).await?.spin().await?;
        }
        let (metric, params) = match (many, guest) {
            (8, "idle") => (Metric::Fork8All, json!({"children": many})),
            _ => (Metric::ForkAll, json!({"children": many, "guest": guest})),
        };
        let (mut samples, n) = (Samples::default(), self.size.samples_of(many));
        for at in 0..n {
            self.say(&format!("fork of {many}, {guest} guest"), at, n);
            tokio::time::sleep(REST).await;
            let start = Instant::now();
            let forked = self.fork_all(id, many).await?;
            samples.add(metric, &params, [ms(start)]);
            self.delete_all(forked).await?;
        }
        self.client.delete(id).await?;
        Ok(samples)
    }

    /// The cost of copy-on-write: the first rewrite after a fork copies each page, in parent and
    /// child.
    pub(super) async fn fork_tax(&self) -> Result<Samples, Failure> {
        let id = self.warm().await?;
        let holder = Holder::start(self.client, id, MIB).await?;
        let mut samples = Samples::default();
        let mut add = |who: &str, after: &str, ms: f64| {
            let params = json!({"mib": MIB, "in": who, "after": after});
            samples.add(Metric::ForkTax, &params, [ms]);
        };
        // An emulated processor has to translate the code once.
        holder.write().await?;
        for at in 0..self.size.n {
            self.say("rewriting after a fork", at, self.size.n);
            add("parent", "nothing", holder.write().await?);
            let forked = self.fork_all(id, 1).await?;
            add("parent", "fork", holder.write().await?);
            let child = holder.of(forked.sandbox.id);
            // The child's emulated processor starts cold: reading runs the same code.
            child.read().await?;
            add("child", "fork", child.write().await?);
            add("child", "nothing", child.write().await?);
            self.delete_all(forked).await?;
        }
        self.client.delete(id).await?;
        Ok(samples)
    }

    /// Forks, and waits until each child has answered.
    pub(super) async fn fork_all(&self, id: SandboxId, many: usize) -> Result<Forked, Failure> {
        let count = Some(i64::try_from(many).unwrap_or(i64::MAX));
        let forked = self.client.fork(id, &ForkSandbox { count, ..Default::default() }).await?;
        try_join_all(forked.children.iter().map(|child| first_event(self.client, child.id))).await?;
        Ok(forked)
    }

    /// Deletes the children of a fork.
    pub(super) async fn delete_all(&self, forked: Forked) -> Result<(), Failure> {
        try_join_all(forked.children.iter().map(|child| self.client.delete(child.id))).await?;
        Ok(())
    }
}
