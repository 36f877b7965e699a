//! End to end tests: a real node, real guests, nothing replaced.
//!
//! `keiki-e2e [FILTER...]` starts a node of its own in a directory of its own, runs the tests whose names
//! contain a filter (all without one), and removes everything again. Tests that kill their node or fill its
//! disk start another one. Settings, all optional:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `KEIKI_E2E_DIR` | working directory, removed at the end | `.keiki/e2e` |
//! | `KEIKI_E2E_CACHE` | kernels and root disks, kept | `.keiki/cache` |
//! | `KEIKI_E2E_BIN` | directory with `keiki` and `keiki-guest` | beside this program |
//! | `KEIKI_E2E_RANGE` | second byte of the first node's slots, so that runs beside each other do not collide | 213 |
//! | `KEIKI_ENGINE` | which engine the nodes run | `qemu` |
//! | `KEIKI_E2E_PATIENCE` | limits of time are multiplied by this | 1 |
//! | `KEIKI_E2E_CLOCK` | also set this machine's clock, by a week and back | unset |
//! | `KEIKI_E2E_LANES` | so many nodes, each with a test at a time, for all tests but those that measure | 1 |
//! | `KEIKI_E2E_LONG` | also run what takes minutes | unset |
//! | `KEIKI_E2E_PART` | `K/N`: of N runs that together are all tests, the one that begins with the Kth group of them | `1/1` |
//! | `KEIKI_E2E_PASSED` | a file with the names of tests that have passed, which are not run again; those that do are added | none |

mod names;
mod node;
mod sandbox;
mod tests;

use anyhow::{Context, Result};
use futures::{FutureExt, future::BoxFuture};
use node::{Node, Options, Places};
use std::{
    collections::{BTreeSet, VecDeque},
    fs::OpenOptions,
    io::Write,
    panic::AssertUnwindSafe,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// No test may take longer.
const TEST_LIMIT: u64 = 300;
/// In a long run.
const LONG_TEST_LIMIT: u64 = 3600;

/// So many seconds, more where the machine is known to be slow: what takes them must not take for ever.
pub fn within(seconds: u64) -> Duration {
    Duration::from_secs(seconds) * patience()
}

/// By what limits of time are multiplied.
pub fn patience() -> u32 {
    number("KEIKI_E2E_PATIENCE").unwrap_or(1)
}

/// Is this a run that may take long?
pub fn long() -> bool {
    std::env::var_os("KEIKI_E2E_LONG").is_some()
}

/// Why a test cannot be run here: what it fails with then, so that it is told and counted.
#[derive(Debug)]
pub struct Skipped(pub &'static str);

impl std::fmt::Display for Skipped {
    fn fmt(&self, out: &mut std::fmt::Formatter) -> std::fmt::Result {
        out.write_str(self.0)
    }
}

impl std::error::Error for Skipped {}

/// What every test gets.
pub struct World {
    /// The node most tests share.
    pub node: Node,
    /// Where further nodes may be made.
    pub places: Places,
}

/// A test.
pub type Test = fn(Arc<World>) -> BoxFuture<'static, Result<()>>;

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let done = runtime.context("no runtime").and_then(|runtime| runtime.block_on(run()));
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<bool> {
    let filters: Vec<String> = std::env::args().skip(1).collect();
    let mut chosen = part(tests::all())?;
    chosen.retain(|(name, _)| {
        filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()))
    });
    let passed = Passed::from_env()?;
    chosen.retain(|(name, _)| !passed.has(name));
    // What measures comes when nothing else runs any more.
    let (alone, beside): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|(name, _)| tests::ALONE.contains(name));
    let places = Places::from_env()?;
    let names = names::serve().await?.to_string();
    let lanes = number("KEIKI_E2E_LANES").unwrap_or(1_usize).clamp(1, beside.len().max(1));

    let beside = Mutex::new(VecDeque::from(beside));
    let lane = async |at: usize| -> Result<(Tally, Arc<World>)> {
        let (mut tally, world) = (Tally::default(), open(&places, at, &names).await?);
        // The first begins with the quick ones, the others with the slow ones at the end: they meet.
        let next = || {
            let mut beside = beside.lock().unwrap_or_else(PoisonError::into_inner);
            if at == 0 { beside.pop_front() } else { beside.pop_back() }
        };
        while let Some((name, test)) = next() {
            if tally.add(name, run_one(test, &world).await) {
                passed.add(name)?;
            }
            // What a failed test left behind must not disturb the next one.
            world.node.delete_all().await;
        }
        Ok((tally, world))
    };
    let mut done = futures::future::try_join_all((0..lanes).map(lane)).await?.into_iter();
    let (mut tally, first) = done.next().context("no lane")?;
    for (other, world) in done {
        tally.join(other);
        tally.close(world).await;
    }
    for (name, test) in alone {
        if tally.add(name, run_one(test, &first).await) {
            passed.add(name)?;
        }
        first.node.delete_all().await;
    }
    tally.close(first).await;
    for name in &tally.failed {
        println!("failed: {name}");
    }
    if !passed.before.is_empty() {
        println!("{} have passed before", passed.before.len());
    }
    let skipped = if tally.skipped > 0 { format!(", {} skipped", tally.skipped) } else { String::new() };
    println!("{} passed, {} failed{skipped}", tally.passed + passed.before.len(), tally.failed.len());
    Ok(tally.failed.is_empty())
}

/// Those of this run, where several share the work: whole groups, because those of a group often share a template, too.
fn part(all: Vec<(&'static str, Test)>) -> Result<Vec<(&'static str, Test)>> {
    let Ok(text) = std::env::var("KEIKI_E2E_PART") else { return Ok(all) };
    let numbers = text.split_once('/').and_then(|(at, of)| Some((at.parse().ok()?, of.parse().ok()?)));
    let (at, of): (usize, usize) = numbers
        .filter(|(at, of)| (1..=*of).contains(at))
        .with_context(|| format!("KEIKI_E2E_PART is `{text}`: write K/N, K from 1 to N"))?;
    let group = |name: &'static str| name.split("::").next().unwrap_or_default();
    let mut groups = Vec::new();
    let mine = all.into_iter().filter(|(name, _)| {
        let place = groups.iter().position(|known| *known == group(name)).unwrap_or_else(|| {
            groups.push(group(name));
            groups.len() - 1
        });
        place % of == at - 1
    });
    Ok(mine.collect())
}

/// Tests that passed in a run that was cut off, so that the next goes on where it was.
struct Passed {
    file: Option<PathBuf>,
    before: BTreeSet<String>,
}

impl Passed {
    fn from_env() -> Result<Self> {
        let file = std::env::var_os("KEIKI_E2E_PASSED").map(PathBuf::from);
        let text = match &file {
            Some(file) if file.exists() => std::fs::read_to_string(file)?,
            _ => String::new(),
        };
        Ok(Self { file, before: text.lines().map(str::to_owned).collect() })
    }

    fn has(&self, name: &str) -> bool {
        self.before.contains(name)
    }

    /// On the disk at once: what cuts a run off may be the end of the machine.
    fn add(&self, name: &str) -> Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        writeln!(file, "{name}")?;
        Ok(file.sync_all()?)
    }
}

/// A node with a directory and a template of its own.
async fn open(places: &Places, lane: usize, names: &str) -> Result<Arc<World>> {
    let begun = Instant::now();
    let places = places.lane(lane);
    let own = tests::templates::own(&places)?;
    let options = Options::named("shared").with(&["--dns", names, "--templates-dir", &own]);
    let node = Node::start(&places, options).await?;
    node.bake().await?;
    println!("node and template ready after {:.1} s", begun.elapsed().as_secs_f64());
    Ok(Arc::new(World { node, places }))
}

/// How long it took, and what was wrong.
async fn run_one(test: Test, world: &Arc<World>) -> (f64, Result<()>) {
    let limit = within(if long() { LONG_TEST_LIMIT } else { TEST_LIMIT });
    let begun = Instant::now();
    let run = AssertUnwindSafe(tokio::time::timeout(limit, test(Arc::clone(world)))).catch_unwind();
    let outcome = match run.await {
        Ok(Ok(done)) => done,
        Ok(Err(_)) => Err(anyhow::anyhow!("it took longer than {} s", limit.as_secs())),
        Err(_) => Err(anyhow::anyhow!("it panicked")),
    };
    (begun.elapsed().as_secs_f64(), outcome)
}

/// What came out.
#[derive(Default)]
struct Tally {
    passed: usize,
    skipped: usize,
    failed: Vec<&'static str>,
}

impl Tally {
    /// Tells of it; has it passed?
    fn add(&mut self, name: &'static str, (took, outcome): (f64, Result<()>)) -> bool {
        let (word, error) = match outcome {
            Ok(()) => {
                self.passed += 1;
                println!("  ok    {took:6.2} s  {name}");
                return true;
            }
            Err(error) if error.is::<Skipped>() => ("skip", error),
            Err(error) => ("FAIL", error),
        };
        println!("  {word}  {took:6.2} s  {name}\n        {error:#}");
        if word == "skip" {
            self.skipped += 1
        } else {
            self.failed.push(name)
        }
        false
    }

    fn join(&mut self, other: Self) {
        self.passed += other.passed;
        self.skipped += other.skipped;
        self.failed.extend(other.failed);
    }

    /// Ends a node, which must leave nothing.
    async fn close(&mut self, world: Arc<World>) {
        let begun = Instant::now();
        let ended = match Arc::into_inner(world) {
            Some(world) => world.node.finish().await,
            None => Err(anyhow::anyhow!("a test still runs")),
        };
        self.add("nothing is left behind", (begun.elapsed().as_secs_f64(), ended));
    }
}

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    std::env::var(variable).ok()?.parse().ok()
}
