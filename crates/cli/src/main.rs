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

use args::{Cli, Command};
use clap::FromArgMatches;
use context::Context;
use exit::{ExitCode, Failure, Outcome};
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
            let outcome = runtime.block_on(run(cli));
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

async fn run(cli: Cli) -> Outcome {
    let global = cli.global;
    match cli.command {
        // These work without a node.
        Command::Doctor(args) => return cmd::doctor::run(Printer::new(global.output), args).await,
        Command::Node(args) => return cmd::node::run(Printer::new(global.output), args).await,
        Command::Completion(args) => return cmd::completion::run(args::command(), args),
        _ => {}
    }
    let context = Context::new(&global)?;
    match cli.command {
        Command::Create(args) => cmd::create::run(context, args).await,
        Command::Run(args) => cmd::run::run(context, args).await,
        Command::Exec(args) => cmd::exec::run(context, args).await,
        Command::Ps(args) => cmd::ps::run(context, args).await,
        Command::Attach(args) => cmd::attach::run(context, args).await,
        Command::Kill(args) => cmd::kill::run(context, args).await,
        Command::Shell(args) => cmd::shell::run(context, args).await,
        Command::Cp(args) => cmd::cp::run(context, args).await,
        Command::Forward(args) => cmd::forward::run(context, args).await,
        Command::Watch(args) => cmd::watch::run(context, args).await,
        Command::Ttl(args) => cmd::ttl::run(context, args).await,
        Command::Ls(args) => cmd::ls::run(context, args).await,
        Command::Inspect(args) => cmd::inspect::run(context, args).await,
        Command::Logs(args) => cmd::logs::run(context, args).await,
        Command::Events(args) => cmd::events::run(context, args).await,
        Command::Top(args) => cmd::top::run(context, args).await,
        Command::Ports(args) => cmd::ports::run(context, args).await,
        Command::Url(args) => cmd::url::run(context, args).await,
        Command::Open(args) => cmd::url::open(context, args).await,
        Command::Pause(args) => cmd::state::pause(context, args).await,
        Command::Resume(args) => cmd::state::resume(context, args).await,
        Command::Hibernate(args) => cmd::state::hibernate(context, args).await,
        Command::Wake(args) => cmd::state::wake(context, args).await,
        Command::Snapshot(args) => cmd::snapshot::run(context, args).await,
        Command::Snapshots(args) => cmd::snapshots::run(context, args).await,
        Command::Restore(args) => cmd::restore::run(context, args).await,
        Command::Fork(args) => cmd::fork::run(context, args).await,
        Command::Tree(args) => cmd::tree::run(context, args).await,
        Command::Rm(args) => cmd::rm::run(context, args).await,
        Command::Template(args) => cmd::template::run(context, args).await,
        Command::Bench(args) => cmd::bench::run(context, args).await,
        Command::Demo(args) => cmd::demo::run(context, args).await,
        Command::Version(args) => cmd::version::run(context, args).await,
        Command::Doctor(_) | Command::Node(_) | Command::Completion(_) => Ok(ExitCode::Success as i32),
    }
}
