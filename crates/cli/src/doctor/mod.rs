//! What this machine can do, and how to mend what is missing. Looks only; changes nothing but temporary files.

mod check;
mod host;
mod limits;
mod memory;
mod network;
mod programs;
mod storage;

pub use check::{Check, Verdict};

use std::path::Path;

/// Looks at everything.
pub fn all(data_dir: &Path) -> Vec<Check> {
    let mut checks = host::checks();
    checks.extend(programs::checks());
    checks.extend(storage::checks(data_dir));
    checks.extend(memory::checks());
    checks.extend(limits::checks());
    checks.extend(network::checks());
    checks
}
