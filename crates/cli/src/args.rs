//! The command line: all commands, and the parser.

use crate::{cmd, context::Global, env, exit};
use clap::{CommandFactory, Parser, Subcommand};

/// fork() for whole machines: snapshot, restore and fork Linux microVMs while they run
#[derive(Debug, Parser)]
#[command(name = "keiki", version, max_term_width = 100, propagate_version = false)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a sandbox from a template
    Create(cmd::create::Args),
    /// Create a sandbox, run a command in it, and delete it
    Run(cmd::run::Args),
    /// Run a command in a sandbox
    Exec(cmd::exec::Args),
    /// List commands running in a sandbox
    Ps(cmd::ps::Args),
    /// Attach to a command running in a sandbox
    Attach(cmd::attach::Args),
    /// Send a signal to commands in a sandbox
    Kill(cmd::kill::Args),
    /// Open a shell in a sandbox
    Shell(cmd::shell::Args),
    /// Copy files between this machine and a sandbox
    Cp(cmd::cp::Args),
    /// Forward local TCP ports to a sandbox
    Forward(cmd::forward::Args),
    /// Watch a file or directory in a sandbox for changes
    Watch(cmd::watch::Args),
    /// Show or set how long a sandbox lives
    Ttl(cmd::ttl::Args),
    /// List sandboxes
    Ls(cmd::ls::Args),
    /// Show details of a sandbox or snapshot
    Inspect(cmd::inspect::Args),
    /// Show the log of a sandbox
    Logs(cmd::logs::Args),
    /// Show the history of sandboxes
    Events(cmd::events::Args),
    /// Show CPU and memory usage of sandboxes, live
    Top(cmd::top::Args),
    /// List listening TCP ports in a sandbox
    Ports(cmd::ports::Args),
    /// Print a browser link to a port in a sandbox
    Url(cmd::url::Args),
    /// Open a port in a sandbox in the browser
    Open(cmd::url::Args),
    /// Pause sandboxes, keeping them in memory
    Pause(cmd::state::Args),
    /// Resume paused sandboxes
    Resume(cmd::state::Args),
    /// Save sandboxes to disk and stop them
    Hibernate(cmd::state::Args),
    /// Wake hibernated sandboxes
    Wake(cmd::state::Args),
    /// Take a snapshot of a running sandbox
    Snapshot(cmd::snapshot::Args),
    /// List or delete snapshots
    Snapshots(cmd::snapshots::Args),
    /// Create a sandbox from a snapshot
    Restore(cmd::restore::Args),
    /// Fork a running sandbox
    Fork(cmd::fork::Args),
    /// Show the fork tree
    Tree(cmd::tree::Args),
    /// Delete sandboxes
    Rm(cmd::rm::Args),
    /// List, build or delete templates
    Template(cmd::template::Args),
    /// Benchmark a node
    Bench(cmd::bench::Args),
    /// Check whether this machine can run Keiki
    Doctor(cmd::doctor::Args),
    /// Run the node, the daemon behind every other command
    Node(cmd::node::Args),
    /// Demonstrate fork on a running node, checking every claim
    Demo(cmd::demo::Args),
    /// Show the versions of keiki and the node
    Version(cmd::version::Args),
    /// Print a shell completion script
    Completion(cmd::completion::Args),
}

/// The parser. Its long help lists exit codes and environment variables.
pub fn command() -> clap::Command {
    let mut after = exit::TABLE.to_owned();
    after.push_str("\n\nEnvironment:");
    for (name, meaning) in env::ALL {
        after.push_str(&format!("\n  {name:<14} {meaning}"));
    }
    after.push_str("\n\nIds can be shortened to any unique prefix or suffix of at least four characters.");
    Cli::command()
        .after_long_help(after)
        .after_help("See `keiki help` for exit codes and environment variables.")
}

#[cfg(test)]
mod tests {
    use super::{Cli, Command, command};
    use crate::{env, printer::Format};
    use clap::{FromArgMatches, Parser};
    use std::time::Duration;

    fn parse(line: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from([&["keiki"], line].concat())
    }

    #[test]
    fn the_definition_is_sound() {
        command().debug_assert();
        assert!(Cli::from_arg_matches(&command().get_matches_from(["keiki", "ls"])).is_ok());
    }

    #[test]
    fn help_and_documentation_name_every_variable_and_command() {
        let help = command().render_long_help().to_string();
        let docs = include_str!("../../../docs/CLI.md");
        for (name, _) in env::ALL {
            assert!(help.contains(name), "{name}");
            assert!(docs.contains(&format!("`{name}`")), "docs/CLI.md misses {name}");
        }
        for sub in command().get_subcommands() {
            assert!(
                docs.contains(&format!("`keiki {}", sub.get_name())),
                "docs/CLI.md misses {}",
                sub.get_name()
            );
        }
    }

    #[test]
    fn what_follows_the_sandbox_is_the_command() {
        let cli = parse(&["exec", "--env", "A=1", "-e", "B=", "abcd", "ls", "-l", "--env", "x"]).unwrap();
        let Command::Exec(args) = cli.command else { panic!("not exec") };
        assert_eq!(args.command, ["ls", "-l", "--env", "x"]);
        assert_eq!(args.options.env, [("A".into(), "1".into()), ("B".into(), String::new())]);

        let cli = parse(&["exec", "abcd", "--", "-x"]).unwrap();
        let Command::Exec(args) = cli.command else { panic!("not exec") };
        assert_eq!(args.command, ["-x"]);

        let cli = parse(&["exec", "abcd", "-t", "5m", "-c", "a | b"]).unwrap();
        let Command::Exec(args) = cli.command else { panic!("not exec") };
        assert_eq!(args.options.timeout, Some(Duration::from_secs(300)));
        assert_eq!(args.shell.as_deref(), Some("a | b"));
    }

    #[test]
    fn nonsense_is_refused() {
        for line in [
            &["exec", "abcd"][..],
            &["exec", "abcd", "-c", "x", "y"],
            &["rm"],
            &["fork", "abcd", "-n", "0"],
            &["fork", "abcd", "-n", "65"],
            &["create", "--ttl", "0"],
            &["create", "--metadata", "x"],
            &["snapshots", "rm"],
            &["template", "build"],
            &["ls", "-o", "yaml"],
            &["events", "-n", "0"],
            &["url", "abcd", "0"],
            &["open", "abcd"],
            &["top", "--interval", "0"],
        ] {
            assert!(parse(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn output_format_goes_anywhere() {
        assert_eq!(parse(&["-o", "json", "ls"]).unwrap().global.output, Format::Json);
        assert_eq!(parse(&["ls", "-o", "json"]).unwrap().global.output, Format::Json);
        assert_eq!(parse(&["template", "ls", "--output", "json"]).unwrap().global.output, Format::Json);
    }
}
