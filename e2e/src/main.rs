//! End to end tests: real nodes, real guests, nothing replaced.
//!
//! A test program like any other, with the options of Rust's test harness: `cargo test -p keiki-e2e -- --ignored [FILTER]`,
//! or `cargo nextest run -P e2e [FILTER]`. `scripts/build.sh dev` comes first. Without `--ignored` nothing runs, so that
//! `cargo test --workspace` stays short.
//!
//! Most tests share the node of their lane and leave it empty; tests that kill their node or fill its disk start another
//! one. Under nextest each test is a process; the next process in the same lane reuses the baked templates. Settings, all
//! optional:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `KEIKI_E2E_DIR` | working directory, removed at the end | `.keiki/e2e` |
//! | `KEIKI_E2E_CACHE` | kernels and root disks, kept | `.keiki/cache` |
//! | `KEIKI_E2E_BIN` | directory with `keiki` and `keiki-guest` | `target/keiki-dev` |
//! | `KEIKI_E2E_RANGE` | second byte of the first node's slots, so that runs beside each other do not collide | 213 |
//! | `KEIKI_ENGINE` | which engine the nodes run | `qemu` |
//! | `KEIKI_E2E_PATIENCE` | limits of time are multiplied by this | 1 |
//! | `KEIKI_E2E_CLOCK` | also run the test that sets this machine's clock a week ahead and back | unset |
//! | `KEIKI_E2E_LONG` | also run what takes minutes | unset |
//! | `KEIKI_E2E_ONLY` | only tests whose names contain one of these words | all |
//! | `KEIKI_E2E_PART` | `K/N`: the Kth of N parts of the tests | `1/1` |
//! | `KEIKI_E2E_PASSED` | a file with the names of passed tests: they are skipped, and new ones added | none |

mod choose;
mod lanes;
mod names;
mod node;
mod sandbox;
mod tests;

use anyhow::Result;
use futures::future::BoxFuture;
use lanes::Lanes;
use libtest_mimic::{Arguments, Trial};
use std::{path::Path, process::ExitCode, sync::Arc, time::Duration};

/// The default number of tests at a time, each on a node of its own: most tests mostly wait.
const LANES: usize = 2;

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

/// What every test gets.
pub struct World {
    /// The node most tests share.
    pub node: node::Node,
    /// Where further nodes may be made.
    pub places: node::Places,
}

/// A test.
pub type Test = fn(Arc<World>) -> BoxFuture<'static, Result<()>>;

fn main() -> ExitCode {
    let args = Arguments::from_args();
    match run(Arguments { test_threads: args.test_threads.or(Some(LANES)), ..args }) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Arguments) -> Result<bool> {
    // Tests find examples and the Python client below the working directory. In the lab it is already right.
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    if Path::new(root).is_dir() {
        std::env::set_current_dir(root)?;
    }
    let lanes = Arc::new(Lanes::new()?);
    let trial = |(name, test): (String, Test)| {
        let (lanes, own) = (Arc::clone(&lanes), name.clone());
        Trial::test(name, move || lanes.run(&own, test).map_err(|error| format!("{error:#}").into()))
            .with_ignored_flag(std::env::var_os("NEXTEST").is_none())
    };
    let trials = choose::chosen()?.into_iter().map(trial).collect();
    let conclusion = libtest_mimic::run(&args, trials);
    lanes.close()?;
    Ok(!conclusion.has_failed())
}

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    std::env::var(variable).ok()?.parse().ok()
}
