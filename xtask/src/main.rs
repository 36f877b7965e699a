//! Chores of this repository, run as `cargo xtask CHORE`.

mod tidy;

use anyhow::{Result, bail};
use std::process::ExitCode;

const USAGE: &str =
    "usage: cargo xtask tidy    what rustc and clippy do not check; see xtask/src/tidy/mod.rs";

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["tidy"] => tidy::run(),
        _ => bail!("{USAGE}"),
    }
}
