//! `keiki completion`.

use crate::{
    args,
    exit::{ExitCode, Failure, Outcome},
};
use clap_complete::Shell;
use std::io::Write;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Runs the command.
pub fn run(args: Args) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut args::command(), "keiki", &mut script);
    std::io::stdout().lock().write_all(&script).map_err(Failure::Output)?;
    Ok(ExitCode::Success as i32)
}
