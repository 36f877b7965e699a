//! A run: all groups in turn, and what they share.

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

pub struct Bench<'a> {
    pub client: &'a Client,
    pub owned: &'a Owned,
    pub progress: &'a Progress,
    pub size: Size,
    /// What to measure; everything if empty.
    pub only: &'a [Pick],
    /// Template to create sandboxes from; None for the node's default.
    pub template: Option<String>,
    pub left_out: Mutex<Vec<LeftOut>>,
}

/// Numbers of samples and machines.
#[derive(Debug, Clone)]
pub struct Size {
    /// Samples per metric.
    pub n: usize,
    /// Numbers of machines created at once.
    pub many: Vec<usize>,
    /// Children whose memory is measured.
    pub children: usize,
    /// RAM of the loaded model in MiB, if the guest has that much.
    pub model_mib: u64,
    /// Skips what takes long: the cold page cache.
    pub quick: bool,
}

impl Size {
    pub fn full(n: usize) -> Self {
        Self { n, many: vec![1, 10, 32], children: 10, model_mib: 1024, quick: false }
    }

    /// Just enough to see that it works.
    pub fn quick(n: usize) -> Self {
        Self { n, many: vec![1, 3], children: 2, model_mib: 32, quick: true }
    }

    /// Samples of a metric with this many machines: the more machines, the fewer samples.
    pub fn samples_of(&self, machines: usize) -> usize {
        match machines {
            0..10 => self.n,
            10..32 => self.n.min(5),
            _ => self.n.min(3),
        }
    }
}

pub(super) const MIB: f64 = 1_048_576.0;
/// Pause between samples, in which the node prepares VMs again, as a node that is not overloaded
/// would.
pub(super) const REST: Duration = Duration::from_millis(500);

pub(super) fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

pub(super) fn true_command() -> ExecRequest {
    ExecRequest { argv: Some(vec!["true".into()]), ..Default::default() }
}

/// Runs `true` and waits for its first event.
pub async fn first_event(client: &Client, id: SandboxId) -> Result<(), Failure> {
    match client.exec_stream(id, &true_command()).await?.next().await {
        Some(event) => Ok(event.map(drop)?),
        None => Err(keiki_client::Error::Interrupted.into()),
    }
}

/// Samples collected so far, by metric and parameters.
#[derive(Default)]
pub(super) struct Samples(Vec<(Metric, Value, Vec<f64>)>);

impl Samples {
    pub fn add(&mut self, metric: Metric, params: &Value, sample: impl IntoIterator<Item = f64>) {
        match self.0.iter_mut().find(|(known, under, _)| *known == metric && under == params) {
            Some((_, _, samples)) => samples.extend(sample),
            None => self.0.push((metric, params.clone(), sample.into_iter().collect())),
        }
    }
}

impl Bench<'_> {
    /// Measures everything. A failure of the node goes into the report, and the run continues.
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
            // The node refused, or a machine misbehaved.
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

    /// Should this be measured with a cold page cache, and can it be?
    fn cold(&self, what: &str, metrics: &[Metric]) -> bool {
        if self.size.quick || !self.wants(metrics) {
            return false;
        }
        let can = page_cache::can_be_emptied(self.client);
        let why = can.as_ref().err().cloned();
        why.into_iter().for_each(|why| self.leave_out(&format!("{what}, cold cache"), why, false));
        can.is_ok()
    }

    /// Records what was not measured.
    pub(super) fn leave_out(&self, what: &str, why: String, failed: bool) {
        self.progress.note(&format!("{what}: skipped: {why}"));
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        left_out.push(LeftOut { what: what.into(), why, failed });
    }

    /// Shows progress.
    pub(super) fn say(&self, what: &str, at: usize, of: usize) {
        if at == 0 {
            self.progress.step(format!("{what}: {of} samples"));
        }
        self.progress.set(format!("{what}: {} of {of}", at + 1));
    }

    pub(super) fn request(&self) -> CreateSandbox {
        CreateSandbox { template: self.template.clone(), ..self.owned.request() }
    }

    /// Creates a sandbox and waits for its first answer.
    pub(super) async fn warm(&self) -> Result<SandboxId, Failure> {
        let id = self.client.create(&self.request()).await?.id;
        first_event(self.client, id).await?;
        Ok(id)
    }

    /// Pauses before a sample, and empties the page cache if the parameters say so.
    pub(super) async fn rest(&self, params: &Value) -> Result<(), Failure> {
        tokio::time::sleep(REST).await;
        if params.get("cache").is_some_and(|cache| cache == "cold") {
            tokio::task::spawn_blocking(page_cache::empty)
                .await
                .map_err(std::io::Error::other)
                .flatten()
                .map_err(crate::exit::io_error("cannot empty the page cache"))?;
        }
        Ok(())
    }
}
