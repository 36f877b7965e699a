//! A run: the groups one after the other, and what they share.

use super::{
    machine::Machine,
    page_cache,
    pick::{Metric, Pick},
    report::{LeftOut, Measured, Report},
};
use crate::{exit::Failure, owned::Owned, progress::Progress};
use futures::StreamExt;
use keiki_client::{
    Client, SandboxId,
    api::{CreateSandbox, ExecRequest},
};
use serde_json::{Value, json};
use std::{
    future::Future,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// One run of the benchmark.
pub struct Bench<'a> {
    /// The node.
    pub client: &'a Client,
    /// What it makes.
    pub owned: &'a Owned,
    /// Says what goes on.
    pub progress: &'a Progress,
    /// How much of it.
    pub size: Size,
    /// What to measure; empty: everything.
    pub only: &'a [Pick],
    /// What to make sandboxes of; None: the node's default.
    pub template: Option<String>,
    /// What could not be measured so far.
    pub left_out: Mutex<Vec<LeftOut>>,
}

/// How many samples, and of how many machines at once.
#[derive(Debug, Clone)]
pub struct Size {
    /// Samples of each metric.
    pub n: usize,
    /// Machines made at once.
    pub many: Vec<usize>,
    /// Children of which the memory is looked at.
    pub children: usize,
    /// RAM of the loaded model, in MiB, where the guest has it.
    pub model_mib: u64,
    /// Leaves out what takes long: the cold page cache.
    pub quick: bool,
}

impl Size {
    /// Everything.
    pub fn full(n: usize) -> Self {
        Self { n, many: vec![1, 10, 32], children: 10, model_mib: 1024, quick: false }
    }

    /// Enough to see that it works.
    pub fn quick(n: usize) -> Self {
        Self { n, many: vec![1, 3], children: 2, model_mib: 32, quick: true }
    }

    /// Samples of something that so many machines take part in: they take their time.
    pub fn samples_of(&self, machines: usize) -> usize {
        match machines {
            0..10 => self.n,
            10..32 => self.n.min(5),
            _ => self.n.min(3),
        }
    }
}

pub(super) const MIB: f64 = 1_048_576.0;
/// Between samples, so that what the node prepares ahead is there again, as on a node that is not overrun.
pub(super) const REST: Duration = Duration::from_millis(500);

pub(super) fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

pub(super) fn true_command() -> ExecRequest {
    ExecRequest { argv: Some(vec!["true".into()]), ..Default::default() }
}

/// Runs `true` and waits for the first thing it says.
pub async fn first_event(client: &Client, id: SandboxId) -> Result<(), Failure> {
    match client.exec_stream(id, &true_command()).await?.next().await {
        Some(event) => Ok(event.map(drop)?),
        None => Err(keiki_client::Error::Interrupted.into()),
    }
}

/// Samples by metric and conditions, while they are gathered.
#[derive(Default)]
pub(super) struct Samples(Vec<(Metric, Value, Vec<f64>)>);

impl Samples {
    /// One more.
    pub fn add(&mut self, metric: Metric, params: &Value, sample: impl IntoIterator<Item = f64>) {
        match self.0.iter_mut().find(|(known, under, _)| *known == metric && under == params) {
            Some((_, _, samples)) => samples.extend(sample),
            None => self.0.push((metric, params.clone(), sample.into_iter().collect())),
        }
    }
}

impl Bench<'_> {
    /// Measures. What the node fails at is said in the report, and the others go on.
    pub async fn run(&self) -> Result<Report, Failure> {
        use Metric::{
            ColdBoot, CreateAll, CreateFirstExec, ExecRoundtrip, Fork8All, ForkAll, ForkFirstExec, ForkPause,
            ForkTax, ForkUserPause, Kill, KillAll, ModelForkAll, ModelPssSum, PrivatePerChild, PssPerChild,
            PssPerIdleChild, Release, ReleaseShare, ReleaseStep, RestoreFirstExec, RestoreStep, Snapshot,
        };
        let begun = Instant::now();
        let engine = self.client.version().await?.engine;
        let mut results = Vec::new();
        let all = &mut results;
        let creates = [RestoreStep, Release, ReleaseStep, CreateFirstExec, ReleaseShare];
        self.part(all, "creates", &[&creates[..], &[Kill]].concat(), self.creates(json!({}))).await?;
        if self.cold("creates", &creates) {
            let cold = self.creates(json!({"cache": "cold"}));
            self.part(all, "creates, cold cache", &creates, cold).await?;
        }
        for &many in &self.size.many {
            let what = format!("{many} creates at once");
            self.part(all, &what, &[CreateAll, KillAll], self.creates_at_once(many)).await?;
        }
        for guest in ["idle", "dirtying"] {
            self.part(all, "commands", &[ExecRoundtrip], self.commands(guest)).await?;
        }
        for guest in ["idle", "dirtying"] {
            let forks = [ForkPause, ForkUserPause, ForkFirstExec];
            self.part(all, "forks", &forks, self.forks(guest)).await?;
        }
        self.part(all, "forks of 8", &[Fork8All], self.forks_of(8, "idle")).await?;
        for guest in ["idle", "dirtying"] {
            for &many in &self.size.many {
                let what = format!("forks of {many}, {guest}");
                self.part(all, &what, &[ForkAll], self.forks_of(many, guest)).await?;
            }
        }
        self.part(all, "rewriting after a fork", &[ForkTax], self.fork_tax()).await?;
        self.part(all, "memory of idle children", &[PssPerIdleChild], self.idle_children()).await?;
        let erosion = [PssPerChild, PrivatePerChild];
        self.part(all, "memory of children that write", &erosion, self.children_that_write()).await?;
        self.part(all, "forks of a model", &[ModelForkAll, ModelPssSum], self.model()).await?;
        self.part(all, "snapshots", &[Snapshot], self.snapshots()).await?;
        self.part(all, "restores", &[RestoreFirstExec], self.restores(json!({}))).await?;
        if self.cold("restores", &[RestoreFirstExec]) {
            let cold = self.restores(json!({"cache": "cold"}));
            self.part(all, "restores, cold cache", &[RestoreFirstExec], cold).await?;
        }
        self.part(all, "cold boot", &[ColdBoot], self.cold_boot()).await?;
        let left_out = std::mem::take(&mut *self.left_out.lock().unwrap_or_else(PoisonError::into_inner));
        let took_seconds = begun.elapsed().as_secs_f64();
        Ok(Report { machine: Machine::here(), engine, results, took_seconds, left_out })
    }

    /// Measures one part, if any of its metrics is wanted.
    async fn part(
        &self,
        results: &mut Vec<Measured>,
        what: &str,
        metrics: &[Metric],
        samples: impl Future<Output = Result<Samples, Failure>>,
    ) -> Result<(), Failure> {
        if !self.wants(metrics) {
            return Ok(());
        }
        let samples = match samples.await {
            Ok(samples) => samples,
            // The node is there and refused, or a machine did not do what it should.
            Err(failure @ (Failure::Node(keiki_client::Error::Api { .. }) | Failure::Wrong(_))) => {
                self.leave_out(what, failure.sentence(), true);
                return self.owned.clear().await;
            }
            Err(failure) => return Err(failure),
        };
        for (metric, params, samples) in samples.0 {
            let wanted = metrics.contains(&metric) && self.wants(&[metric]);
            results.extend(wanted.then(|| Measured::new(metric, params, &samples)).flatten());
        }
        Ok(())
    }

    fn wants(&self, metrics: &[Metric]) -> bool {
        let picked = |metric: &Metric| self.only.iter().any(|pick| pick.has(*metric));
        self.only.is_empty() || metrics.iter().any(picked)
    }

    /// Is this to be measured with a cold page cache, and can it be?
    fn cold(&self, what: &str, metrics: &[Metric]) -> bool {
        if self.size.quick || !self.wants(metrics) {
            return false;
        }
        let can = page_cache::can_be_emptied(self.client);
        let why = can.as_ref().err().cloned();
        why.into_iter().for_each(|why| self.leave_out(&format!("{what}, cold cache"), why, false));
        can.is_ok()
    }

    /// Remembers what was not measured.
    pub(super) fn leave_out(&self, what: &str, why: String, failed: bool) {
        self.progress.note(&format!("{what}: left out: {why}"));
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        left_out.push(LeftOut { what: what.into(), why, failed });
    }

    /// Says which sample of how many is taken.
    pub(super) fn say(&self, what: &str, at: usize, of: usize) {
        if at == 0 {
            self.progress.step(format!("{what}: {of} samples"));
        }
        self.progress.set(format!("{what}: {} of {of}", at + 1));
    }

    /// A create of this run.
    pub(super) fn request(&self) -> CreateSandbox {
        CreateSandbox { template: self.template.clone(), ..self.owned.request() }
    }

    /// A running sandbox that has answered once.
    pub(super) async fn warm(&self) -> Result<SandboxId, Failure> {
        let id = self.client.create(&self.request()).await?.id;
        first_event(self.client, id).await?;
        Ok(id)
    }

    /// Rests before a sample; with an empty page cache, if the conditions say so.
    pub(super) async fn rest(&self, params: &Value) -> Result<(), Failure> {
        tokio::time::sleep(REST).await;
        if params.get("cache").is_some_and(|cache| cache == "cold") {
            tokio::task::spawn_blocking(page_cache::empty)
                .await
                .map_err(std::io::Error::other)
                .flatten()
                .map_err(crate::exit::io_error("emptying the page cache"))?;
        }
        Ok(())
    }
}
