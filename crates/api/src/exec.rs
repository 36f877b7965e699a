//! A command whose output is being read.

use crate::Result;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use std::sync::Arc;

/// What a running command sends, in order. `Exit` comes last; a stream that ends without it lost its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// Standard output; with a pty, all output.
    Stdout {
        /// Position of the first byte. A gap: bytes were overwritten before they were read.
        offset: u64,
        /// The bytes.
        data: Bytes,
    },
    /// Standard error.
    Stderr {
        /// As for `Stdout`.
        offset: u64,
        /// The bytes.
        data: Bytes,
    },
    /// The end.
    Exit {
        /// As a shell reports it.
        code: i32,
        /// Killed at its time limit.
        timed_out: bool,
        /// Why it could not start; otherwise empty.
        message: String,
        /// Run time in ms.
        duration_ms: u64,
    },
}

/// A command that is being read. Dropping `events` kills one that ends with its caller, unless it has exited.
pub struct Session {
    /// The command's id in its sandbox.
    pub id: String,
    /// Where in standard output and standard error the events begin.
    pub offsets: [u64; 2],
    /// What the command sends.
    pub events: BoxStream<'static, Result<ExecEvent>>,
    /// Input and signals.
    pub control: Arc<dyn Control>,
}

/// Input and signals of a command. Every call fails once the command or its machine has ended.
#[async_trait]
pub trait Control: Send + Sync {
    /// Writes to standard input, or ends it. Returns when the guest has taken the bytes.
    async fn input(&self, data: Bytes, eof: bool) -> Result<()>;

    /// Sends a signal to every process of the command.
    async fn signal(&self, signal: i32) -> Result<()>;

    /// Sets the size of the terminal.
    async fn resize(&self, cols: u32, rows: u32) -> Result<()>;

    /// Lets the command outlive its caller.
    fn leave(&self);
}

/// Where to start reading a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFrom {
    /// At these positions in standard output and standard error.
    Offsets([u64; 2]),
    /// At most this many bytes before the end of each.
    Tail(u64),
}
