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

mod names;
mod node;
mod sandbox;
mod tests;

use anyhow::{Context, Result};
use futures::{FutureExt, future::BoxFuture};
use node::{Node, Options, Places};
use std::{
    collections::VecDeque,
    panic::AssertUnwindSafe,
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
    std::env::var("KEIKI_E2E_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Is this a run that may take long?
pub fn long() -> bool {
    std::env::var_os("KEIKI_E2E_LONG").is_some()
}

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
    let chosen = tests::all().into_iter().filter(|(name, _)| {
        filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()))
    });
    // What measures comes when nothing else runs any more.
    let (alone, beside): (Vec<_>, Vec<_>) = chosen.partition(|(name, _)| tests::ALONE.contains(name));
    let places = Places::from_env()?;
    let names = names::serve().await?.to_string();
    let lanes = number("KEIKI_E2E_LANES").unwrap_or(1).clamp(1, beside.len().max(1));

    let beside = Mutex::new(VecDeque::from(beside));
    let lane = async |at: usize| -> Result<(Tally, Arc<World>)> {
        let (mut tally, world) = (Tally::default(), open(&places, at, &names).await?);
        // The first begins with the quick ones, the others with the slow ones at the end: they meet.
        let next = || {
            let mut beside = beside.lock().unwrap_or_else(PoisonError::into_inner);
            if at == 0 { beside.pop_front() } else { beside.pop_back() }
        };
        while let Some((name, test)) = next() {
            tally.add(name, run_one(test, &world).await);
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
        tally.add(name, run_one(test, &first).await);
        first.node.delete_all().await;
    }
    tally.close(first).await;
    for name in &tally.failed {
        println!("failed: {name}");
    }
    println!("{} passed, {} failed", tally.passed, tally.failed.len());
    Ok(tally.failed.is_empty())
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
    failed: Vec<&'static str>,
}

impl Tally {
    fn add(&mut self, name: &'static str, (took, outcome): (f64, Result<()>)) {
        match outcome {
            Ok(()) => {
                self.passed += 1;
                println!("  ok    {took:6.2} s  {name}");
            }
            Err(error) => {
                println!("  FAIL  {took:6.2} s  {name}\n        {error:#}");
                self.failed.push(name);
            }
        }
    }

    fn join(&mut self, other: Self) {
        self.passed += other.passed;
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

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}
