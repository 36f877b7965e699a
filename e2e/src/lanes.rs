//! Lanes: nodes that each run one test at a time.

use crate::{
    Test, World, choose, long, names,
    node::{Node, Options, Places, first_lane},
    tests, within,
};
use anyhow::{Context, Result, anyhow, bail};
use futures::FutureExt;
use std::{
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};
use tokio::runtime::Runtime;

/// No test may take longer, in seconds.
const TEST_LIMIT: u64 = 300;
/// In a long run.
const LONG_TEST_LIMIT: u64 = 3600;

/// The lanes of this process. Nodes start on demand.
pub struct Lanes {
    runtime: Runtime,
    next: AtomicUsize,
    /// Lanes without a test.
    idle: Mutex<Vec<Arc<World>>>,
    /// Shared by running tests; a test that runs alone takes it exclusively.
    running: RwLock<()>,
}

impl Lanes {
    /// Starts nothing yet.
    pub fn new() -> Result<Self> {
        Ok(Self {
            runtime: tokio::runtime::Builder::new_multi_thread().enable_all().build()?,
            next: AtomicUsize::new(first_lane()),
            idle: Mutex::new(Vec::new()),
            running: RwLock::new(()),
        })
    }

    /// Runs a test in a lane.
    pub fn run(&self, name: &str, test: Test) -> Result<()> {
        let (_alone, _beside);
        if tests::is_alone(name) {
            _alone = self.running.write().unwrap_or_else(PoisonError::into_inner);
        } else {
            _beside = self.running.read().unwrap_or_else(PoisonError::into_inner);
        }
        let idle = self.idle().pop();
        self.runtime.block_on(async {
            let world = match idle {
                Some(world) => world,
                None => open(self.next.fetch_add(1, Ordering::Relaxed)).await?,
            };
            let begun = Instant::now();
            let outcome = limited(test, &world).await;
            eprintln!("{name}: {:.2} s", begun.elapsed().as_secs_f64());
            // What a failed test left behind must not disturb the next one.
            world.node.delete_all().await;
            self.idle().push(world);
            outcome
        })?;
        choose::passed(name)
    }

    /// Stops all nodes and checks that they leave nothing behind.
    pub fn close(&self) -> Result<()> {
        let worlds = std::mem::take(&mut *self.idle());
        for world in worlds {
            let world = Arc::into_inner(world).context("a test still runs")?;
            self.runtime.block_on(world.node.finish()).context("stopping a lane")?;
        }
        Ok(())
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Arc<World>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts a node with its own directory and template.
async fn open(lane: usize) -> Result<Arc<World>> {
    let begun = Instant::now();
    let places = Places::from_env()?.lane(lane);
    let own = tests::templates::own(&places)?;
    let names = names::serve().await?.to_string();
    let options =
        Options::named("shared").with(&["--dns", &names, "--templates-dir", &own]).kept_by_nextest();
    let node = Node::start(&places, options).await?;
    node.bake().await?;
    // Removes what a killed process left.
    node.delete_all().await;
    eprintln!("node and template ready after {:.1} s", begun.elapsed().as_secs_f64());
    Ok(Arc::new(World { node, places }))
}

async fn limited(test: Test, world: &Arc<World>) -> Result<()> {
    let limit = within(if long() { LONG_TEST_LIMIT } else { TEST_LIMIT });
    let run = AssertUnwindSafe(tokio::time::timeout(limit, test(Arc::clone(world)))).catch_unwind();
    match run.await {
        Ok(Ok(done)) => done,
        Ok(Err(_)) => bail!("it took longer than {} s", limit.as_secs()),
        Err(_) => Err(anyhow!("it panicked")),
    }
}
