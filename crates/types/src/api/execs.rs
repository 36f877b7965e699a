//! Commands that go on without their caller.

use super::ExecRequest;
use serde::{Deserialize, Serialize};

/// `POST /v1/sandboxes/{id}/execs`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct StartExec {
    /// What to run. Its `stdin` is all its input, unless `stdin_open`.
    #[serde(flatten)]
    pub command: ExecRequest,
    /// Keep its standard input open for more.
    #[serde(default)]
    pub stdin_open: bool,
    /// Run it on a terminal of this size.
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

/// A command in a sandbox, running or ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Exec {
    /// Id, in its sandbox and in every fork that began while it was known.
    pub id: String,
    /// `running` or `exited`.
    pub status: String,
    /// Program and arguments, or the shell line; cut where it is long.
    pub argv: Vec<String>,
    /// Its process id inside.
    pub pid: u32,
    /// When it began, by the sandbox's clock.
    pub started_at: String,
    /// It has a terminal.
    pub pty: bool,
    /// It goes on without its caller.
    pub background: bool,
    /// Somebody reads its output now.
    pub attached: bool,
    /// Bytes it wrote to standard output; with a terminal, all it wrote.
    pub stdout_bytes: u64,
    /// Bytes it wrote to standard error.
    pub stderr_bytes: u64,
    /// Once it has ended: as a shell reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// It was killed because its time was up.
    #[serde(default)]
    pub timed_out: bool,
    /// Once it has ended: run time in ms.
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
    /// A name (`TERM`, `SIGTERM`) or a number.
    pub signal: Signal,
}

/// A signal by its name or number.
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
    /// Bytes the command's pipe or terminal took. Less than was sent: nobody reads it any more.
    pub bytes: u64,
}
