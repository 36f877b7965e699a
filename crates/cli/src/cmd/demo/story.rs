//! The steps of the demo, and what must be true after each.

use super::guest::{Files, Guest, Held};
use crate::{
    bench::first_event, cmd::template, context::Context, exit::Failure, ids::short, owned::Owned,
    progress::Progress,
};
use futures::future::try_join_all;
use keiki_client::{
    SnapshotId, TemplateName,
    api::{BuildTemplate, CreateSandbox, ForkSandbox, Timings},
};
use serde::Serialize;
use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

const FORKS: usize = 4;
/// Primes below 200,000.
const PRIMES: u32 = 17_984;

/// How long one step took, in ms.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Row {
    pub step: &'static str,
    pub total_ms: f64,
    pub vcpu_pause_ms: Option<f64>,
    pub user_pause_ms: Option<f64>,
    pub thaw_ms: Option<f64>,
    /// Request to the first output of a command in the new sandbox; in the slowest of several.
    pub first_output_ms: Option<f64>,
}

pub struct Story<'a> {
    context: &'a Context,
    owned: &'a Owned,
    template: TemplateName,
    rows: Vec<Row>,
}

/// Fails with `otherwise` unless `condition` holds.
fn must(condition: bool, otherwise: impl FnOnce() -> String) -> Result<(), Failure> {
    if condition { Ok(()) } else { Err(Failure::Wrong(otherwise())) }
}

/// Is `copy` the same process as `origin`, continued and not labelled yet?
fn is_continuation(origin: &Held, copy: &Held) -> Result<(), Failure> {
    let (a, b) = (origin, copy);
    must(a.secret == b.secret && a.pid == b.pid, || format!("not the same process: {a:?}, then {b:?}"))?;
    must(b.primes == PRIMES, || format!("the table in RAM is corrupt: {} primes", b.primes))?;
    must(b.counter >= a.counter, || format!("the counter went back from {} to {}", a.counter, b.counter))?;
    must(b.labels.is_empty(), || format!("it holds labels it was never given: {:?}", b.labels))
}

/// Does a sandbox hold its own label everywhere, no other label, and everything that was built?
fn is_itself(label: &str, held: &Held, files: &Files, built: &Files) -> Result<(), Failure> {
    must(held.labels == [label], || format!("RAM of {label} holds labels {:?}", held.labels))?;
    must(files.labels == format!("{label} {label}"), || {
        format!("files of {label} hold labels {}", files.labels)
    })?;
    must(files.digests == built.digests, || format!("built files of {label} changed"))
}

impl<'a> Story<'a> {
    pub fn new(context: &'a Context, owned: &'a Owned, template: TemplateName) -> Self {
        Self { context, owned, template, rows: Vec::new() }
    }

    /// Runs all steps and returns their times.
    pub async fn tell(mut self) -> Result<Vec<Row>, Failure> {
        self.prepare_template().await?;
        let parent = self.create().await?;
        let built = self.build(&parent).await?;
        let (snapshot, before) = self.snapshot(&parent).await?;
        let forks = self.fork(&parent).await?;
        self.diverge(&parent, &forks, &built).await?;
        self.kill_one(&parent, &forks).await?;
        self.restore(snapshot, &before, &parent, &built).await?;
        Ok(self.rows)
    }

    /// Prints a line; with JSON, stdout belongs to the result.
    fn print(&self, line: &str) -> Result<(), Failure> {
        if self.context.out.is_json() {
            self.context.out.note(line);
            return Ok(());
        }
        self.context.out.line(line)
    }

    fn time(
        &mut self,
        step: &'static str,
        total: Duration,
        timings: Option<Timings>,
        first_output: Option<Duration>,
    ) {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        let Timings { vcpu_pause_ms, user_pause_ms, thaw_ms, .. } = timings.unwrap_or_default();
        let (total_ms, first_output_ms) = (ms(total), first_output.map(ms));
        self.rows.push(Row { step, total_ms, vcpu_pause_ms, user_pause_ms, thaw_ms, first_output_ms });
    }

    async fn prepare_template(&self) -> Result<(), Failure> {
        match self.context.client.template(&self.template).await {
            Ok(template) if template.status == "ready" => return Ok(()),
            Err(error) if !error.is_not_found() => return Err(error.into()),
            _ => {}
        }
        self.print(&format!("Building template {} (once; takes minutes)", self.template))?;
        let request = BuildTemplate { name: self.template.to_string(), ..Default::default() };
        template::build(self.context, &request).await.map(drop)
    }

    async fn create(&mut self) -> Result<Guest, Failure> {
        let client = &self.context.client;
        let request = CreateSandbox { template: Some(self.template.to_string()), ..self.owned.request() };
        let start = Instant::now();
        let sandbox = client.create(&request).await?;
        let total = start.elapsed();
        first_event(client, sandbox.id).await?;
        let first = start.elapsed();
        let guest = Guest::find(client, sandbox.id).await?;
        self.time("create", total, sandbox.timings, Some(first));
        self.print(&format!(
            "Created sandbox {}: a whole Linux machine, restored from its template",
            short(sandbox.id)
        ))?;
        Ok(guest)
    }

    async fn build(&mut self, parent: &Guest) -> Result<Files, Failure> {
        let progress = Progress::start("building state in the sandbox");
        let start = Instant::now();
        parent.build().await?;
        let held = parent.held().await?;
        must(held.primes == PRIMES, || format!("the table holds {} primes, not {PRIMES}", held.primes))?;
        let built = parent.files().await?;
        self.time("build state", start.elapsed(), None, None);
        drop(progress);
        self.print(&format!(
            "Built state in it: process {} with {} primes and a secret in RAM, 4 MiB on disk, 1 MiB in tmpfs",
            held.pid, held.primes
        ))?;
        Ok(built)
    }

    async fn snapshot(&mut self, parent: &Guest) -> Result<(SnapshotId, Held), Failure> {
        let progress = Progress::start("taking a snapshot");
        let before = parent.held().await?;
        let start = Instant::now();
        let snapshot = self.context.client.snapshot(parent.id).await?;
        self.time("snapshot", start.elapsed(), snapshot.timings, None);
        drop(progress);
        let after = parent.held_when("the parent continues", |held| held.counter > before.counter).await?;
        is_continuation(&before, &after)?;
        self.print(&format!(
            "Took snapshot {} while it ran; its counter continued to {}",
            short(snapshot.id),
            after.counter
        ))?;
        Ok((snapshot.id, before))
    }

    async fn fork(&mut self, parent: &Guest) -> Result<Vec<Guest>, Failure> {
        let client = self.context.client.clone();
        let progress = Progress::start("forking");
        let before = parent.held().await?;
        let request = ForkSandbox { count: Some(FORKS as i64), ..Default::default() };
        let start = Instant::now();
        let forked = client.fork(parent.id, &request).await?;
        let total = start.elapsed();
        try_join_all(forked.children.iter().map(|child| first_event(&client, child.id))).await?;
        let first = start.elapsed();
        drop(progress);
        must(forked.children.len() == FORKS, || {
            format!("{} children instead of {FORKS}", forked.children.len())
        })?;
        let mut timings = forked.timings;
        // The slowest child, where the fork itself has no thaw time.
        let thaws = forked.children.iter().filter_map(|child| child.timings.as_ref()?.thaw_ms);
        timings.thaw_ms = timings.thaw_ms.or_else(|| thaws.max_by(f64::total_cmp));
        self.time("fork of four", total, Some(timings), Some(first));
        let forks: Vec<Guest> = forked.children.iter().map(|child| parent.relative(child.id)).collect();
        for fork in &forks {
            is_continuation(&before, &fork.held().await?)?;
        }
        self.print(&format!(
            "Forked it {FORKS} times while it ran: in each fork the same process, \
             with the same secret, continues counting from {} or later",
            before.counter
        ))?;
        Ok(forks)
    }

    async fn diverge(&mut self, parent: &Guest, forks: &[Guest], built: &Files) -> Result<(), Failure> {
        let progress = Progress::start("letting the forks diverge");
        let start = Instant::now();
        let family: Vec<(String, &Guest)> = std::iter::once(("parent".to_owned(), parent))
            .chain(forks.iter().enumerate().map(|(at, fork)| (format!("fork{}", at + 1), fork)))
            .collect();
        for (label, guest) in &family {
            guest.label(label).await?;
        }
        // Give all labels before looking at any, to catch one that leaks.
        for (label, guest) in &family {
            let held = guest.held_when("the process knows its label", |held| !held.labels.is_empty()).await?;
            is_itself(label, &held, &guest.files().await?, built)?;
        }
        let mut random = BTreeSet::new();
        let mut names = BTreeSet::new();
        for (_, guest) in &family {
            let (bytes, name) = guest.identity().await?;
            random.insert(bytes);
            names.insert(name);
        }
        must(random.len() == family.len(), || "two sandboxes drew the same random bytes".into())?;
        must(names.len() == family.len(), || format!("two sandboxes have the same host name: {names:?}"))?;
        self.time("diverge and check", start.elapsed(), None, None);
        drop(progress);
        self.print(
            "Labelled each one: RAM, disk and tmpfs hold its own label and no other; \
             random bytes and host names differ",
        )
    }

    async fn kill_one(&mut self, parent: &Guest, forks: &[Guest]) -> Result<(), Failure> {
        let Some((victim, others)) = forks.split_first() else { return Ok(()) };
        let mut before = Vec::new();
        for guest in others.iter().chain([parent]) {
            before.push((guest, guest.held().await?.counter));
        }
        let start = Instant::now();
        self.context.client.delete(victim.id).await?;
        self.time("kill", start.elapsed(), None, None);
        for (guest, counter) in before {
            guest.held_when("it continues", |held| held.counter > counter).await?;
        }
        self.print("Deleted one fork: the others and the parent keep running")
    }

    async fn restore(
        &mut self,
        snapshot: SnapshotId,
        before: &Held,
        parent: &Guest,
        built: &Files,
    ) -> Result<(), Failure> {
        let client = self.context.client.clone();
        let progress = Progress::start("restoring the snapshot");
        let start = Instant::now();
        let sandbox = client.restore(snapshot, self.owned.request()).await?;
        let total = start.elapsed();
        first_event(&client, sandbox.id).await?;
        let first = start.elapsed();
        drop(progress);
        self.time("restore", total, sandbox.timings, Some(first));
        let restored = parent.relative(sandbox.id);
        let held = restored.held().await?;
        is_continuation(before, &held)?;
        let files = restored.files().await?;
        must(files.digests == built.digests, || "built files changed in the snapshot".into())?;
        must(files.labels == "- -", || format!("the snapshot holds labels given later: {}", files.labels))?;
        restored.held_when("it continues", |later| later.counter > held.counter).await?;
        self.print(&format!(
            "Restored the snapshot into a new sandbox: the process continues counting from {} \
             and knows nothing of what happened later",
            before.counter
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::{Files, Held, PRIMES, is_continuation, is_itself};

    fn held(counter: u64, labels: &[&str]) -> Held {
        let labels = labels.iter().map(ToString::to_string).collect();
        Held { secret: "s".into(), pid: 7, primes: PRIMES, counter, labels }
    }

    fn files(labels: &str) -> Files {
        Files { digests: "d".into(), labels: labels.into() }
    }

    #[test]
    fn a_continuation_is_the_same_process_later() {
        assert!(is_continuation(&held(5, &[]), &held(5, &[])).is_ok());
        assert!(is_continuation(&held(5, &[]), &held(9, &[])).is_ok());
        for other in [
            held(4, &[]),
            held(5, &["parent"]),
            Held { secret: "t".into(), ..held(5, &[]) },
            Held { pid: 8, ..held(5, &[]) },
            Held { primes: 1, ..held(5, &[]) },
        ] {
            assert!(is_continuation(&held(5, &[]), &other).is_err(), "{other:?}");
        }
    }

    #[test]
    fn a_leak_is_seen_wherever_it_is() {
        let built = files("");
        assert!(is_itself("fork1", &held(1, &["fork1"]), &files("fork1 fork1"), &built).is_ok());
        assert!(is_itself("fork1", &held(1, &["fork1", "fork2"]), &files("fork1 fork1"), &built).is_err());
        assert!(is_itself("fork1", &held(1, &["fork2"]), &files("fork1 fork1"), &built).is_err());
        assert!(is_itself("fork1", &held(1, &["fork1"]), &files("fork2 fork1"), &built).is_err());
        assert!(is_itself("fork1", &held(1, &["fork1"]), &files("fork1 -"), &built).is_err());
        let changed = Files { digests: "x".into(), ..files("fork1 fork1") };
        assert!(is_itself("fork1", &held(1, &["fork1"]), &changed, &built).is_err());
    }

    #[test]
    fn the_table_has_as_many_primes_as_there_are() {
        let count = (2u32..200_000).filter(|n| (2..).take_while(|d| d * d <= *n).all(|d| n % d != 0)).count();
        assert_eq!(count, PRIMES as usize);
    }
}
