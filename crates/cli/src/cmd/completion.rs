//! `keiki completion`.

use crate::exit::{ExitCode, Failure, Outcome};
use clap_complete::Shell;
use std::io::Write;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shell to complete in
    #[arg(value_enum)]
    pub shell: Shell,
}

pub fn run(mut command: clap::Command, args: Args) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "keiki", &mut script);
    std::io::stdout().lock().write_all(&script).map_err(Failure::Output)?;
    Ok(ExitCode::Success as i32)
}
