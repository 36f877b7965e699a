//! Checks whether this machine can run Keiki. Changes nothing but temporary files.

mod check;
mod host;
mod limits;
mod memory;
mod network;
mod programs;
mod storage;

pub use check::{Check, Verdict};

use std::path::Path;

/// Runs all checks.
pub fn all(data_dir: &Path) -> Vec<Check> {
    let mut checks = host::checks();
    checks.extend(programs::checks());
    checks.extend(storage::checks(data_dir));
    checks.extend(memory::checks());
    checks.extend(limits::checks());
    checks.extend(network::checks());
    checks
}
