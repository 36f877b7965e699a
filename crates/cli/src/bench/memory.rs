//! Memory that copies share until they write to it.

use super::{
    guest::{Holder, MIB as HELD_MIB},
    pick::Metric,
    run::{Bench, MIB, Samples, ms},
};
use crate::exit::Failure;
use keiki_client::{
    SandboxId,
    api::{ForkSandbox, Forked, MemoryUse},
};
use serde_json::json;
use std::time::{Duration, Instant};

/// Idle children, and how long to wait before measuring them.
const IDLE_CHILDREN: i64 = 4;
const IDLE: Duration = Duration::from_secs(2);
/// RAM for the guest's kernel, the agent and the holder's own program, in MiB.
const GUEST_OWN_MIB: u64 = 160;

impl Bench<'_> {
    pub(super) async fn idle_children(&self) -> Result<Samples, Failure> {
        self.progress.step("memory of idle children");
        let id = self.warm().await?;
        let request = ForkSandbox { count: Some(IDLE_CHILDREN), ..Default::default() };
        let forked = self.client.fork(id, &request).await?;
        tokio::time::sleep(IDLE).await;
        let (mut samples, params) = (Samples::default(), json!({"children": IDLE_CHILDREN}));
        for memory in self.memory_of(&forked).await? {
            samples.add(Metric::PssPerIdleChild, &params, [memory.pss_bytes as f64 / MIB]);
        }
        self.delete_all(forked).await?;
        self.client.delete(id).await?;
        Ok(samples)
    }

    /// Children share their parent's RAM until they write to it.
    pub(super) async fn children_that_write(&self) -> Result<Samples, Failure> {
        self.progress.step("memory of children that write");
        let id = self.warm().await?;
        let holder = Holder::start(self.client, id, HELD_MIB).await?;
        let children = self.size.children;
        let forked = self.fork_all(id, children).await?;
        let mut samples = Samples::default();
        for state in ["started", "read", "half written", "written"] {
            self.progress.set(format!("memory of children: {state}"));
            for child in &forked.children {
                let child = holder.of(child.id);
                match state {
                    "read" => drop(child.read().await?),
                    "half written" => drop(child.write_mib(HELD_MIB / 2).await?),
                    "written" => drop(child.write().await?),
                    _ => {}
                }
            }
            tokio::time::sleep(IDLE).await;
            let params = json!({"children": children, "held_mib": HELD_MIB, "state": state});
            for memory in self.memory_of(&forked).await? {
                samples.add(Metric::PssPerChild, &params, [memory.pss_bytes as f64 / MIB]);
                samples.add(Metric::PrivatePerChild, &params, [memory.private_bytes as f64 / MIB]);
            }
        }
        self.delete_all(forked).await?;
        self.client.delete(id).await?;
        Ok(samples)
    }

    /// A guest that holds a model of a GiB, and ten forks of it: together little larger than one.
    pub(super) async fn model(&self) -> Result<Samples, Failure> {
        let sandbox = self.client.create(&self.request()).await?;
        let room = u64::from(sandbox.memory_mb).saturating_sub(GUEST_OWN_MIB);
        let (mib, children) = (self.size.model_mib.min(room), self.size.children);
        let mut samples = Samples::default();
        if mib == 0 {
            let why = format!("a guest of {} MiB has no room for a model", sandbox.memory_mb);
            self.leave_out("forks of a model", why, false);
            self.client.delete(sandbox.id).await?;
            return Ok(samples);
        }
        self.progress.step(format!("loading a model of {mib} MiB"));
        let holder = Holder::start(self.client, sandbox.id, mib).await?;
        self.progress.step(format!("forks of a model: {children} children"));
        let params = |state: Option<&str>| {
            let mut params = json!({"model_mib": mib, "children": children});
            state.into_iter().for_each(|state| params["state"] = state.into());
            params
        };
        let start = Instant::now();
        let forked = self.fork_all(sandbox.id, children).await?;
        samples.add(Metric::ModelForkAll, &params(None), [ms(start)]);
        for state in ["started", "read", "tenth written"] {
            self.progress.set(format!("forks of a model: {state}"));
            for child in &forked.children {
                let child = holder.of(child.id);
                match state {
                    "read" => drop(child.read().await?),
                    "tenth written" => drop(child.write_mib(mib / 10).await?),
                    _ => {}
                }
            }
            tokio::time::sleep(IDLE).await;
            let mut all = self.memory_of(&forked).await?;
            all.push(self.memory(sandbox.id).await?);
            let sum: u64 = all.iter().map(|memory| memory.pss_bytes).sum();
            samples.add(Metric::ModelPssSum, &params(Some(state)), [sum as f64 / MIB]);
        }
        self.delete_all(forked).await?;
        self.client.delete(sandbox.id).await?;
        Ok(samples)
    }

    async fn memory_of(&self, forked: &Forked) -> Result<Vec<MemoryUse>, Failure> {
        let mut all = Vec::with_capacity(forked.children.len());
        for child in &forked.children {
            all.push(self.memory(child.id).await?);
        }
        Ok(all)
    }

    async fn memory(&self, id: SandboxId) -> Result<MemoryUse, Failure> {
        let memory = self.client.sandbox(id).await?.memory;
        memory.ok_or_else(|| Failure::Wrong(format!("the node does not report the memory use of {id}")))
    }
}
