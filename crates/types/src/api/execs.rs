//! Background commands.

use super::ExecRequest;
use serde::{Deserialize, Serialize};

/// `POST /v1/sandboxes/{id}/execs`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct StartExec {
    /// Command to run. `stdin` is all of its input unless `stdin_open` is set.
    #[serde(flatten)]
    pub command: ExecRequest,
    /// Keep standard input open for more.
    #[serde(default)]
    pub stdin_open: bool,
    /// Run the command on a terminal of this size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<PtySize>,
}

/// Size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PtySize {
    /// Columns, 1 to 1000.
    pub cols: u32,
    /// Rows, 1 to 1000.
    pub rows: u32,
}

/// A command in a sandbox, running or exited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Exec {
    /// Id in its sandbox, and in forks of it.
    pub id: String,
    /// `running` or `exited`.
    pub status: String,
    /// Program and arguments, or the shell command line; shortened if long.
    pub argv: Vec<String>,
    /// Process id in the sandbox.
    pub pid: u32,
    /// When it started, by the sandbox's clock.
    pub started_at: String,
    /// Runs on a terminal.
    pub pty: bool,
    /// Keeps running without its caller.
    pub background: bool,
    /// A caller is reading its output.
    pub attached: bool,
    /// Bytes written to standard output; on a terminal, all output.
    pub stdout_bytes: u64,
    /// Bytes written to standard error.
    pub stderr_bytes: u64,
    /// Exit code, as a shell reports it, once it has exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// It was killed by its timeout.
    #[serde(default)]
    pub timed_out: bool,
    /// Run time in ms, once it has exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
}

/// `GET /v1/sandboxes/{id}/execs`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecList {
    /// Oldest first.
    pub items: Vec<Exec>,
}

/// `POST /v1/sandboxes/{id}/execs/{exec}/signal`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SignalExec {
    pub signal: Signal,
}

/// A signal, by name or number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum Signal {
    /// 1 to 64.
    Number(i64),
    /// `TERM` or `SIGTERM`.
    Name(String),
}

/// Answer to `POST /v1/sandboxes/{id}/execs/{exec}/stdin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct InputTaken {
    /// Bytes the command's pipe or terminal accepted. Fewer than were sent means that it stopped
    /// reading.
    pub bytes: u64,
}
