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
//! | `KEIKI_E2E_LONG` | also run what takes minutes | unset |

mod names;
mod node;
mod sandbox;
mod tests;

use anyhow::{Context, Result};
use futures::{FutureExt, future::BoxFuture};
use node::{Node, Options, Places};
use std::{
    panic::AssertUnwindSafe,
    process::ExitCode,
    sync::Arc,
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
    let chosen: Vec<_> = tests::all()
        .into_iter()
        .filter(|(name, _)| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())))
        .collect();
    let places = Places::from_env()?;
    let begun = Instant::now();
    let names = names::serve().await?.to_string();
    let own = tests::templates::own(&places)?;
    let options = Options::named("shared").with(&["--dns", &names, "--templates-dir", &own]);
    let node = Node::start(&places, options).await?;
    node.bake().await?;
    println!("node and template ready after {:.1} s", begun.elapsed().as_secs_f64());
    let world = Arc::new(World { node, places });

    let limit =
        within(if std::env::var_os("KEIKI_E2E_LONG").is_some() { LONG_TEST_LIMIT } else { TEST_LIMIT });
    let (mut passed, mut failed) = (0, Vec::new());
    for (name, test) in chosen {
        let begun = Instant::now();
        let run = AssertUnwindSafe(tokio::time::timeout(limit, test(Arc::clone(&world)))).catch_unwind();
        let outcome = match run.await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err(anyhow::anyhow!("it took longer than {} s", limit.as_secs())),
            Err(_) => Err(anyhow::anyhow!("it panicked")),
        };
        let took = begun.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                passed += 1;
                println!("  ok    {took:6.2} s  {name}");
            }
            Err(error) => {
                println!("  FAIL  {took:6.2} s  {name}\n        {error:#}");
                failed.push(name);
            }
        }
        // What a failed test left behind must not disturb the next one.
        world.node.delete_all().await;
    }
    let leaks = match Arc::into_inner(world) {
        Some(world) => world.node.finish().await,
        None => Err(anyhow::anyhow!("a test still runs")),
    };
    if let Err(error) = leaks {
        println!("  FAIL  nothing is left behind\n        {error:#}");
        failed.push("nothing is left behind");
    } else {
        passed += 1;
        println!("  ok    nothing is left behind");
    }
    for name in &failed {
        println!("failed: {name}");
    }
    println!("{passed} passed, {} failed", failed.len());
    Ok(failed.is_empty())
}
