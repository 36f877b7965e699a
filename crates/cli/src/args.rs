//! The command line: which commands there are and the options all of them have.

use crate::{cmd, env, exit, printer::Format, text::parse_duration};
use clap::{CommandFactory, Parser, Subcommand};
use std::time::Duration;

/// fork() for whole machines: Linux microVMs that you snapshot, restore and fork while they run
#[derive(Debug, Parser)]
#[command(name = "keiki", version, max_term_width = 100, propagate_version = false)]
pub struct Cli {
    /// Options of all commands.
    #[command(flatten)]
    pub global: Global,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of all commands.
#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Where the node is
    #[arg(long, global = true, env = env::URL, default_value = "http://127.0.0.1:7777", hide_env_values = true)]
    pub url: String,
    /// Key for the node
    #[arg(long, global = true, env = env::API_KEY, hide_env_values = true)]
    pub api_key: Option<String>,
    /// How results are printed
    #[arg(short, long, global = true, value_enum, default_value_t)]
    pub output: Format,
    /// How long a create or fork waits for room on the node [default: 60s]
    #[arg(long, global = true, value_name = "DURATION", value_parser = parse_duration)]
    pub wait: Option<Duration>,
}

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a sandbox from a template
    Create(cmd::create::Args),
    /// Make a sandbox, run one command in it, remove it
    Run(cmd::run::Args),
    /// Run a command in a sandbox; its exit code is passed through
    Exec(cmd::exec::Args),
    /// List the commands of a sandbox
    Ps(cmd::ps::Args),
    /// Read a command that goes on in a sandbox, from its beginning or anywhere
    Attach(cmd::attach::Args),
    /// Send a signal to commands in a sandbox
    Kill(cmd::kill::Args),
    /// Open a terminal in a sandbox
    Shell(cmd::shell::Args),
    /// Copy files and directories between here and a sandbox
    Cp(cmd::cp::Args),
    /// Carry TCP connections from here to ports in a sandbox
    Forward(cmd::forward::Args),
    /// Tell what changes in a directory of a sandbox
    Watch(cmd::watch::Args),
    /// Say or change how long a sandbox may be idle
    Ttl(cmd::ttl::Args),
    /// List sandboxes
    Ls(cmd::ls::Args),
    /// Show everything about a sandbox or snapshot
    Inspect(cmd::inspect::Args),
    /// Show the log of a sandbox
    Logs(cmd::logs::Args),
    /// Show what happened to sandboxes
    Events(cmd::events::Args),
    /// Show what sandboxes use: CPU and memory, live
    Top(cmd::top::Args),
    /// List the ports that something in a sandbox listens on
    Ports(cmd::ports::Args),
    /// Print a link to a port of a sandbox, for a browser
    Url(cmd::url::Args),
    /// Open a port of a sandbox in a browser
    Open(cmd::url::Args),
    /// Stop the vCPUs of sandboxes, keep them in memory
    Pause(cmd::pause::Args),
    /// Let paused sandboxes go on
    Resume(cmd::resume::Args),
    /// Store sandboxes and stop them
    Hibernate(cmd::hibernate::Args),
    /// Bring hibernated sandboxes back
    Wake(cmd::wake::Args),
    /// Take a snapshot of a sandbox, which goes on
    Snapshot(cmd::snapshot::Args),
    /// List or remove snapshots
    Snapshots(cmd::snapshots::Args),
    /// Make a sandbox from a snapshot
    Restore(cmd::restore::Args),
    /// Branch sandboxes off a running one, which goes on
    Fork(cmd::fork::Args),
    /// Draw who came from whom
    Tree(cmd::tree::Args),
    /// Remove sandboxes
    Rm(cmd::rm::Args),
    /// List, build or remove templates
    Template(cmd::template::Args),
    /// Measure a node
    Bench(cmd::bench::Args),
    /// Say what this machine can do and how to mend what is missing
    Doctor(cmd::doctor::Args),
    /// Serve /v1 on this machine
    Node(cmd::node::Args),
    /// Tell the story of fork on a running node, checking every claim
    Demo(cmd::demo::Args),
    /// Show the versions of this program and the node
    Version(cmd::version::Args),
    /// Print shell completions
    Completion(cmd::completion::Args),
}

/// The parser, with exit codes and environment variables in its long help.
pub fn command() -> clap::Command {
    let mut after = exit::TABLE.to_owned();
    after.push_str("\n\nEnvironment:");
    for (name, meaning) in env::ALL {
        after.push_str(&format!("\n  {name:<14} {meaning}"));
    }
    after.push_str("\n\nAn id may be shortened to a unique beginning or end of at least four characters.");
    Cli::command()
        .after_long_help(after)
        .after_help("`keiki help` lists exit codes and environment variables.")
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
