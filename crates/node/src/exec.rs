//! Commands in a sandbox.

use crate::error::Result;
use bytes::Bytes;
use futures::stream::BoxStream;

/// What a running command sends, in order. `Exit` is last; a stream that ends without it lost its machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// Bytes of standard output (with a pty: all output).
    Stdout(Bytes),
    /// Bytes of standard error.
    Stderr(Bytes),
    /// The end.
    Exit {
        /// As a shell reports it.
        code: i32,
        /// Killed because its time was up.
        timed_out: bool,
        /// Why it could not start, else empty.
        message: String,
        /// Run time in ms.
        duration_ms: u64,
    },
}

/// A started command. Dropping it kills the command's whole cgroup, unless it has exited.
pub struct Session {
    /// What it sends.
    pub events: BoxStream<'static, Result<ExecEvent>>,
    /// The way back in.
    pub control: Control,
}

/// Input and signals of a command. Cheap to clone.
#[derive(Clone)]
pub struct Control {
    pub(crate) inner: std::sync::Arc<dyn ControlInner>,
}

/// How [`Control`] reaches the guest.
#[async_trait::async_trait]
pub(crate) trait ControlInner: Send + Sync {
    async fn input(&self, data: Bytes, eof: bool) -> Result<()>;
    async fn signal(&self, signal: i32) -> Result<()>;
    async fn resize(&self, cols: u32, rows: u32) -> Result<()>;
}

impl Control {
    /// Sends bytes to standard input, or ends it.
    ///
    /// # Errors
    /// If the command or the machine has ended.
    pub async fn input(&self, data: Bytes, eof: bool) -> Result<()> {
        self.inner.input(data, eof).await
    }

    /// Sends a signal to every process of the command.
    ///
    /// # Errors
    /// If the command or the machine has ended.
    pub async fn signal(&self, signal: i32) -> Result<()> {
        self.inner.signal(signal).await
    }

    /// Tells the terminal its size.
    ///
    /// # Errors
    /// If the command or the machine has ended.
    pub async fn resize(&self, cols: u32, rows: u32) -> Result<()> {
        self.inner.resize(cols, rows).await
    }
}
