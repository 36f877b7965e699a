//! Chores of this repository, run as `cargo xtask CHORE`.

mod ci;
mod lab;
mod tidy;

use anyhow::{Context, Result, bail};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

const USAGE: &str = "usage: cargo xtask ci [STAGE...]      every test and gate; see xtask/src/ci/mod.rs
       cargo xtask tidy              what rustc and clippy do not check; see xtask/src/tidy/mod.rs
       cargo xtask lab [--] COMMAND...  runs a command in a machine with KVM; see xtask/src/lab/mod.rs";

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((chore, [])) if chore == "tidy" => tidy::run(),
        Some((chore, stages)) if chore == "ci" => ci::run(stages),
        Some((chore, rest)) if chore == "lab" => lab::run(rest),
        _ => bail!("{USAGE}"),
    }
}

/// The workspace's directory.
fn root() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().map(Path::to_owned).context("xtask is not in a workspace")
}
