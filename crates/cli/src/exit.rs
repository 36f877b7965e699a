//! Exit codes, and the failures behind them.

use keiki_client::Error;
use keiki_sys::error_chain;
use std::io;

/// Result of a command: its exit code, or a failure.
pub type Outcome = Result<i32, Failure>;

/// The exit codes of `keiki` itself. `exec`, `run` and `shell` pass the remote code through; 124
/// and 125 mean what they mean to `timeout` and `docker run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitCode {
    Success = 0,
    /// `doctor` found a problem, or `bench --compare` something worse.
    Problems = 1,
    /// `--timeout` expired, or the guest did not answer in time.
    Timeout = 124,
    /// `keiki` itself failed: bad arguments, no node, a refused request, a broken connection.
    Failed = 125,
}

/// For the help text.
pub const TABLE: &str = "\
Exit codes:
  0        success
  1        `doctor` found a problem; `bench --compare` found a regression
  124      --timeout expired, or the guest did not answer in time
  125      keiki itself failed: bad arguments, no node, a refused request, a broken connection
  128+n    keiki was killed by signal n (130: Ctrl-C)
  others   `exec`, `run`, `shell`: the exit code of the remote command, as a shell reports it
           (126 not executable, 127 not found, 128+n killed by signal n)";

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Bad arguments.
    #[error("{0}")]
    Usage(String),
    /// The node refused, failed, or did not answer.
    #[error(transparent)]
    Node(#[from] Error),
    /// A call on this machine failed.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot write output")]
    Output(#[source] io::Error),
    #[error(transparent)]
    Archive(keiki_archive::Error),
    /// A result is not what it must be.
    #[error("{0}")]
    Wrong(String),
    #[error("the node failed to start")]
    Daemon(#[source] keiki_node::Error),
    /// Killed by this signal.
    #[error("interrupted")]
    Signal(i32),
}

impl Failure {
    /// The exit code.
    pub fn code(&self) -> i32 {
        match self {
            Self::Node(error) if error.is_timeout() => ExitCode::Timeout as i32,
            Self::Signal(signal) => 128 + signal,
            // As a shell reports a process killed by SIGPIPE.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => 128 + 13,
            _ => ExitCode::Failed as i32,
        }
    }

    /// Is there no reader left to tell?
    pub fn is_silent(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The whole chain on one line.
    pub fn sentence(&self) -> String {
        match self {
            // The HTTP client's layers only repeat that it did not connect.
            Self::Node(Error::Unreachable { source, .. }) => {
                let last =
                    std::iter::successors(Some(source as &dyn std::error::Error), |e| e.source()).last();
                last.map_or_else(|| self.to_string(), |last| format!("{self}: {last}"))
            }
            _ => error_chain(self),
        }
    }
}

/// Says what was being done when an I/O call failed.
pub fn io_error<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Failure {
    let what = what.into();
    move |source| Failure::Io { what, source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::{ExitCode, Failure, TABLE};
    use keiki_client::Error;
    use std::io;

    #[test]
    fn codes_are_as_documented() {
        let api = |status| {
            Failure::Node(Error::Api { status, message: "m".into(), console: None, retry_after: None })
        };
        assert_eq!(api(504).code(), 124);
        assert_eq!(api(404).code(), 125);
        assert_eq!(Failure::Signal(2).code(), 130);
        assert_eq!(Failure::Output(io::ErrorKind::BrokenPipe.into()).code(), 141);
        for code in [ExitCode::Success, ExitCode::Problems, ExitCode::Timeout, ExitCode::Failed] {
            assert!(TABLE.contains(&format!("\n  {} ", code as i32)), "{code:?}");
        }
        let docs = include_str!("../../../docs/CLI.md");
        for line in TABLE.lines().skip(1).filter(|line| line.starts_with("  ") && !line.starts_with("   ")) {
            let code = line.split_whitespace().next().unwrap();
            assert!(docs.contains(&format!("| {code} |")), "docs/CLI.md misses exit code {code}");
        }
    }

    #[test]
    fn the_sentence_holds_the_whole_chain_once() {
        let failure = Failure::Io { what: "reading x".into(), source: io::Error::other("disk gone") };
        assert_eq!(failure.sentence(), "reading x: disk gone");
        let api =
            Error::Api { status: 404, message: "no such sandbox".into(), console: None, retry_after: None };
        assert_eq!(Failure::Node(api).sentence(), "no such sandbox");
    }
}
