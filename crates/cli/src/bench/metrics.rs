//! Taking the samples.

use super::{Measured, Metric, Report, dirtier, dirtier::Dirtier, machine::Machine};
use crate::{exit::Failure, owned::Owned, printer::Printer, progress::Progress};
use futures::{StreamExt, future::try_join_all};
use keiki_client::{
    Client, SandboxId, TemplateName,
    api::{ExecRequest, ForkSandbox, Timings},
};
use serde_json::json;
use std::time::{Duration, Instant};

/// One run of the benchmark.
pub struct Bench<'a> {
    /// The node.
    pub client: &'a Client,
    /// What it makes.
    pub owned: &'a Owned,
    /// Says what goes on.
    pub progress: &'a Progress,
    /// Says what was left out.
    pub out: Printer,
    /// Samples of each metric.
    pub n: usize,
    /// What to measure; empty: everything.
    pub only: &'a [Metric],
}

const MIB: f64 = 1_048_576.0;
/// Children of which the memory is looked at, and how long they do nothing before.
const IDLE_CHILDREN: i64 = 4;
const IDLE: Duration = Duration::from_secs(2);
/// Between samples, so that what the node prepares ahead is there again, as on a node that is not overrun.
const REST: Duration = Duration::from_millis(500);
/// Commands before the first that counts: an emulated processor has to meet the code once.
const WARM_EXECS: usize = 20;
/// Commands are short and vary: so many for each sample of the others.
const EXECS: usize = 10;
/// What a create does one after the other until the vCPUs run, as its step times name it.
const TO_RUNNING: [&str; 4] = ["admit", "record", "place", "thaw"];

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

fn true_command() -> ExecRequest {
    ExecRequest { argv: Some(vec!["true".into()]), ..Default::default() }
}

/// Runs `true` and waits for the first thing it says.
pub async fn first_event(client: &Client, id: SandboxId) -> Result<(), Failure> {
    match client.exec_stream(id, &true_command()).await?.next().await {
        Some(event) => Ok(event.map(drop)?),
        None => Err(keiki_client::Error::Interrupted.into()),
    }
}

/// From the request to running vCPUs, by the node's own clock.
fn until_running(timings: &Timings) -> Option<f64> {
    let thaw = timings.steps.iter().position(|step| step.name == "thaw")?;
    let steps = timings.steps[..=thaw].iter().filter(|step| TO_RUNNING.contains(&step.name.as_str()));
    Some(steps.map(|step| step.ms).sum())
}

impl Bench<'_> {
    /// Measures.
    pub async fn run(&self) -> Result<Report, Failure> {
        let engine = self.client.version().await?.engine;
        let mut results = Vec::new();
        if self.wants(&[Metric::RestoreStep, Metric::CreateFirstExec, Metric::Kill]) {
            results.extend(self.creates().await?);
        }
        if self.wants(&[Metric::ExecRoundtrip]) {
            results.extend(self.exec_roundtrip("idle").await?);
            results.extend(self.exec_roundtrip("dirtying").await?);
        }
        if self.wants(&[Metric::ForkPause, Metric::ForkFirstExec]) {
            results.extend(self.forks("idle").await?);
            results.extend(self.forks("dirtying").await?);
        }
        if self.wants(&[Metric::Fork8All]) {
            results.extend(self.fork8_all().await?);
        }
        if self.wants(&[Metric::PssPerIdleChild]) {
            results.extend(self.pss_per_idle_child().await?);
        }
        if self.wants(&[Metric::Snapshot]) {
            results.extend(self.snapshot().await?);
        }
        if self.wants(&[Metric::ColdBoot]) {
            results.extend(self.cold_boot().await?);
        }
        Ok(Report { machine: Machine::here(), engine, results })
    }

    fn wants(&self, metrics: &[Metric]) -> bool {
        self.only.is_empty() || metrics.iter().any(|metric| self.only.contains(metric))
    }

    fn say(&self, what: &str, at: usize) {
        if at == 0 {
            self.progress.step(format!("{what}: {} samples", self.n));
        }
        self.progress.say(format!("{what}: {} of {}", at + 1, self.n));
    }

    /// A running sandbox that has answered once.
    async fn warm(&self) -> Result<SandboxId, Failure> {
        let id = self.client.create(&self.owned.request()).await?.id;
        first_event(self.client, id).await?;
        Ok(id)
    }

    async fn creates(&self) -> Result<Vec<Measured>, Failure> {
        let (mut thaws, mut firsts, mut kills) = (Vec::new(), Vec::new(), Vec::new());
        for at in 0..self.n {
            self.say("create", at);
            tokio::time::sleep(REST).await;
            let start = Instant::now();
            let sandbox = self.client.create(&self.owned.request()).await?;
            first_event(self.client, sandbox.id).await?;
            firsts.push(ms(start));
            thaws.extend(sandbox.timings.as_ref().and_then(until_running));
            let start = Instant::now();
            self.client.delete(sandbox.id).await?;
            kills.push(ms(start));
        }
        let all = [
            (Metric::RestoreStep, Measured::new("restore_step", "ms", json!({}), &thaws)),
            (Metric::CreateFirstExec, Measured::new("create_first_exec", "ms", json!({}), &firsts)),
            (Metric::Kill, Measured::new("kill", "ms", json!({}), &kills)),
        ];
        Ok(all
            .into_iter()
            .filter(|(metric, _)| self.wants(&[*metric]))
            .filter_map(|(_, measured)| measured)
            .collect())
    }

    async fn exec_roundtrip(&self, guest: &str) -> Result<Option<Measured>, Failure> {
        let id = self.warm().await?;
        if guest == "dirtying" {
            Dirtier::start(self.client, id).await?.spin().await?;
        }
        let mut samples = Vec::new();
        for at in 0..WARM_EXECS + self.n * EXECS {
            if at % EXECS == 0 {
                self.progress.say(format!("exec, {guest} guest: {at}"));
            }
            let start = Instant::now();
            self.client.exec(id, &true_command()).await?;
            samples.push(ms(start));
        }
        self.client.delete(id).await?;
        let params = json!({"guest": guest, "after": WARM_EXECS});
        Ok(Measured::new("exec_roundtrip", "ms", params, &samples[WARM_EXECS..]))
    }

    /// The RAM is dirtied anew before each fork, since each fork makes a new base; while it spins, that goes on
    /// by itself.
    async fn forks(&self, guest: &str) -> Result<Vec<Measured>, Failure> {
        let id = self.warm().await?;
        let dirtier = Dirtier::start(self.client, id).await?;
        if guest == "dirtying" {
            dirtier.spin().await?;
        }
        let (mut vcpu, mut user, mut firsts) = (Vec::new(), Vec::new(), Vec::new());
        for at in 0..self.n {
            self.say(&format!("fork, {guest} guest"), at);
            if guest == "idle" {
                dirtier.dirty().await?;
                tokio::time::sleep(REST).await;
            } else {
                // Long enough to have touched most of it again.
                tokio::time::sleep(REST).await;
            }
            let start = Instant::now();
            let forked = self.client.fork(id, &ForkSandbox::default()).await?;
            first_event(self.client, forked.sandbox.id).await?;
            firsts.push(ms(start));
            vcpu.extend(forked.timings.vcpu_pause_ms);
            user.extend(forked.timings.user_pause_ms);
            self.client.delete(forked.sandbox.id).await?;
        }
        self.client.delete(id).await?;
        let params = || json!({"guest": guest, "dirty_mib": dirtier::MIB});
        let mut all = Vec::new();
        if self.wants(&[Metric::ForkPause]) {
            all.extend(Measured::new("fork_pause", "ms", params(), &vcpu));
            all.extend(Measured::new("fork_user_pause", "ms", params(), &user));
        }
        if self.wants(&[Metric::ForkFirstExec]) {
            all.extend(Measured::new("fork_first_exec", "ms", params(), &firsts));
        }
        Ok(all)
    }

    async fn fork8_all(&self) -> Result<Option<Measured>, Failure> {
        let id = self.warm().await?;
        let mut samples = Vec::new();
        for at in 0..self.n {
            self.say("fork of eight", at);
            tokio::time::sleep(REST).await;
            let start = Instant::now();
            let request = ForkSandbox { count: Some(8), ..Default::default() };
            let forked = self.client.fork(id, &request).await?;
            try_join_all(forked.children.iter().map(|child| first_event(self.client, child.id))).await?;
            samples.push(ms(start));
            for child in &forked.children {
                self.client.delete(child.id).await?;
            }
        }
        self.client.delete(id).await?;
        Ok(Measured::new("fork8_all", "ms", json!({"children": 8}), &samples))
    }

    async fn pss_per_idle_child(&self) -> Result<Option<Measured>, Failure> {
        self.progress.step("memory of idle children");
        let id = self.warm().await?;
        let request = ForkSandbox { count: Some(IDLE_CHILDREN), ..Default::default() };
        let forked = self.client.fork(id, &request).await?;
        tokio::time::sleep(IDLE).await;
        let mut samples = Vec::new();
        for child in &forked.children {
            let memory = self.client.sandbox(child.id).await?.memory;
            samples.extend(memory.map(|memory| memory.pss_bytes as f64 / MIB));
        }
        for child in &forked.children {
            self.client.delete(child.id).await?;
        }
        self.client.delete(id).await?;
        Ok(Measured::new("pss_per_idle_child", "MiB", json!({"children": IDLE_CHILDREN}), &samples))
    }

    async fn snapshot(&self) -> Result<Option<Measured>, Failure> {
        let id = self.warm().await?;
        let mut samples = Vec::new();
        for at in 0..self.n {
            self.say("snapshot", at);
            tokio::time::sleep(REST).await;
            let start = Instant::now();
            let snapshot = self.client.snapshot(id).await?;
            samples.push(ms(start));
            self.client.delete_snapshot(snapshot.id).await?;
        }
        self.client.delete(id).await?;
        Ok(Measured::new("snapshot", "ms", json!({}), &samples))
    }

    /// The bake measured it; booting again would build a template.
    async fn cold_boot(&self) -> Result<Option<Measured>, Failure> {
        let name: TemplateName = "base".parse().map_err(|error| Failure::Wrong(format!("{error}")))?;
        let boot = self.client.cold_boot_ms(&name).await?;
        if boot.is_none() {
            self.out.note("cold_boot: left out, the node does not tell how long the bake of `base` booted");
        }
        Ok(boot.and_then(|ms| Measured::new("cold_boot", "ms", json!({"template": "base"}), &[ms])))
    }
}

#[cfg(test)]
mod tests {
    use super::until_running;
    use keiki_client::api::{Step, Timings};

    #[test]
    fn what_is_timed_within_a_step_counts_once_and_what_follows_not_at_all() {
        let steps = [
            ("admit", 1.0),
            ("record", 2.0),
            ("place", 4.0),
            ("load", 3.0),
            ("run", 5.0),
            ("thaw", 8.0),
            ("connect", 16.0),
            ("record", 32.0),
        ];
        let steps = steps.map(|(name, ms)| Step { name: name.into(), ms }).into();
        let timings = Timings { steps, ..Timings::default() };
        assert_eq!(until_running(&timings), Some(15.0));
        assert_eq!(until_running(&Timings::default()), None);
    }
}
