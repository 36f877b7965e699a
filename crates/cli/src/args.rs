//! The command line: all commands, and the parser.

use crate::{
    cmd,
    context::{Context, Global},
    env,
    exit::{self, Outcome},
    printer::Printer,
};
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

/// The commands by their functions: those that talk to a node, then those that need none.
macro_rules! commands {
    (
        $($(#[$doc:meta])* $name:ident($file:ident::$run:ident),)*
        @local
        $($(#[$local_doc:meta])* $local:ident($local_file:ident::$local_run:ident),)*
    ) => {
        #[derive(Debug, Subcommand)]
        pub enum Command {
            $($(#[$doc])* $name(cmd::$file::Args),)*
            $($(#[$local_doc])* $local(cmd::$local_file::Args),)*
            /// Print a shell completion script
            Completion(cmd::completion::Args),
        }

        impl Cli {
            pub async fn run(self) -> Outcome {
                let out = Printer::new(self.global.output);
                match self.command {
                    $(Command::$name(args) => cmd::$file::$run(Context::new(&self.global)?, args).await,)*
                    $(Command::$local(args) => cmd::$local_file::$local_run(out, args).await,)*
                    Command::Completion(args) => cmd::completion::run(command(), args),
                }
            }
        }
    };
}

commands! {
    /// Create a sandbox from a template
    Create(create::run),
    /// Create a sandbox, run a command in it, and delete it
    Run(run::run),
    /// Run a command in a sandbox
    Exec(exec::run),
    /// List commands running in a sandbox
    Ps(ps::run),
    /// Attach to a command running in a sandbox
    Attach(attach::run),
    /// Send a signal to commands in a sandbox
    Kill(kill::run),
    /// Open a shell in a sandbox
    Shell(shell::run),
    /// Copy files between this machine and a sandbox
    Cp(cp::run),
    /// Forward local TCP ports to a sandbox
    Forward(forward::run),
    /// Watch a file or directory in a sandbox for changes
    Watch(watch::run),
    /// Show or set how long a sandbox lives
    Ttl(ttl::run),
    /// List sandboxes
    Ls(ls::run),
    /// Show details of a sandbox or snapshot
    Inspect(inspect::run),
    /// Show the log of a sandbox
    Logs(logs::run),
    /// Show the history of sandboxes
    Events(events::run),
    /// Show CPU and memory usage of sandboxes, live
    Top(top::run),
    /// List listening TCP ports in a sandbox
    Ports(ports::run),
    /// Print a browser link to a port in a sandbox
    Url(url::run),
    /// Open a port in a sandbox in the browser
    Open(url::open),
    /// Pause sandboxes, keeping them in memory
    Pause(state::pause),
    /// Resume paused sandboxes
    Resume(state::resume),
    /// Save sandboxes to disk and stop them
    Hibernate(state::hibernate),
    /// Wake hibernated sandboxes
    Wake(state::wake),
    /// Take a snapshot of a running sandbox
    Snapshot(snapshot::run),
    /// List or delete snapshots
    Snapshots(snapshots::run),
    /// Create a sandbox from a snapshot
    Restore(restore::run),
    /// Fork a running sandbox
    Fork(fork::run),
    /// Show the fork tree
    Tree(tree::run),
    /// Delete sandboxes
    Rm(rm::run),
    /// List, build or delete templates
    Template(template::run),
    /// Benchmark a node
    Bench(bench::run),
    /// Demonstrate fork on a running node, checking every claim
    Demo(demo::run),
    /// Show the versions of keiki and the node
    Version(version::run),
    @local
    /// Check whether this machine can run Keiki
    Doctor(doctor::run),
    /// Run the node, the daemon behind every other command
    Node(node::run),
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
        assert_eq!(args.line.command, ["ls", "-l", "--env", "x"]);
        assert_eq!(args.options.env, [("A".into(), "1".into()), ("B".into(), String::new())]);

        let cli = parse(&["exec", "abcd", "--", "-x"]).unwrap();
        let Command::Exec(args) = cli.command else { panic!("not exec") };
        assert_eq!(args.line.command, ["-x"]);

        let cli = parse(&["exec", "abcd", "-t", "5m", "-c", "a | b"]).unwrap();
        let Command::Exec(args) = cli.command else { panic!("not exec") };
        assert_eq!(args.options.timeout, Some(Duration::from_secs(300)));
        assert_eq!(args.line.shell.as_deref(), Some("a | b"));
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
