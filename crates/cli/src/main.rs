//! `keiki`: the command line, the daemon included.
//!
//! Each command is one file in [`cmd`]: its arguments and an async `run`, which returns an exit
//! code or an [`exit::Failure`]. Only this file prints failures and ends the process.

mod args;
mod bench;
mod cmd;
mod config;
mod context;
mod doctor;
mod env;
mod exit;
mod ids;
mod input;
mod owned;
mod printer;
mod progress;
mod signals;
mod text;

use args::Cli;
use clap::FromArgMatches;
use exit::{ExitCode, Failure};
use printer::{Format, Printer};

fn main() {
    // For every program started from here. Monitors do it again themselves.
    let _ = keiki_sys::process::close_others_at_exec();
    let matches = args::command().try_get_matches();
    let cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::Failed } else { ExitCode::Success };
            let _ = error.print();
            std::process::exit(code as i32);
        }
    };
    let out = Printer::new(Format::Table);
    let outcome = match tokio::runtime::Runtime::new() {
        Ok(runtime) => {
            let outcome = runtime.block_on(cli.run());
            // A thread may still be waiting for input.
            runtime.shutdown_background();
            outcome
        }
        Err(source) => Err(Failure::Io { what: "cannot start the runtime".into(), source }),
    };
    let code = match outcome {
        Ok(code) => code,
        Err(failure) => {
            report(out, &failure);
            failure.code()
        }
    };
    std::process::exit(code);
}

fn report(out: Printer, failure: &Failure) {
    if failure.is_silent() {
        return;
    }
    if let Failure::Node(error) = failure
        && let Some(console) = error.console().filter(|console| !console.trim().is_empty())
    {
        out.note("last lines of the guest's console:");
        for line in console.lines() {
            out.note(&format!("  | {}", text::plain(line)));
        }
    }
    out.note(&format!("keiki: {}", failure.sentence()));
}
