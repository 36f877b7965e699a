//! Commands that go on without their caller.

use crate::{error::Result, exec::ExecStream, sandboxes::path, transport::Client};
use bytes::Bytes;
use keiki_types::{
    SandboxId,
    api::execs::{Exec, ExecList, InputTaken, Signal, SignalExec, StartExec},
};
use reqwest::{Body, Method};

/// Where to read a command from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// These bytes of standard output and standard error on.
    Offsets(u64, u64),
    /// So many bytes before the end of each.
    Tail(u64),
}

fn at(id: SandboxId, exec: &str, rest: &str) -> String {
    path(id, &format!("/execs/{exec}{rest}"))
}

#[allow(clippy::missing_errors_doc)] // Each fails as `Error` says; nothing differs per verb.
impl Client {
    /// Starts a command that goes on without its caller.
    pub async fn start_exec(&self, id: SandboxId, request: &StartExec) -> Result<Exec> {
        self.post(&path(id, "/execs"), request).await
    }

    /// All commands that run, and those that ended lately, oldest first.
    pub async fn execs(&self, id: SandboxId) -> Result<Vec<Exec>> {
        self.get::<ExecList>(&path(id, "/execs")).await.map(|list| list.items)
    }

    /// One command.
    pub async fn get_exec(&self, id: SandboxId, exec: &str) -> Result<Exec> {
        self.get(&at(id, exec, "")).await
    }

    /// Reads a command from there to its end. Dropping the stream leaves the command as it is.
    pub async fn attach_exec(&self, id: SandboxId, exec: &str, from: From) -> Result<ExecStream> {
        let query = match from {
            From::Offsets(out, err) => vec![("stdout_offset", out), ("stderr_offset", err)],
            From::Tail(bytes) => vec![("tail", bytes)],
        };
        let request = self.request(Method::GET, &at(id, exec, "/stream")).query(&query);
        let response = self.send(request.header("accept", "text/event-stream")).await?;
        Ok(ExecStream::new(response))
    }

    /// Sends a signal to every process of a command.
    pub async fn signal_exec(&self, id: SandboxId, exec: &str, signal: Signal) -> Result<()> {
        let request = self.request(Method::POST, &at(id, exec, "/signal")).json(&SignalExec { signal });
        self.send(request).await.map(drop)
    }

    /// Writes to a command's standard input or terminal; `eof` ends it. Returns how much was taken.
    pub async fn write_exec(&self, id: SandboxId, exec: &str, data: Bytes, eof: bool) -> Result<u64> {
        let request = self.request(Method::POST, &at(id, exec, "/stdin")).query(&[("eof", eof)]);
        self.json::<InputTaken>(request.body(Body::from(data))).await.map(|taken| taken.bytes)
    }

    /// Kills what still runs of a command and forgets it.
    pub async fn remove_exec(&self, id: SandboxId, exec: &str) -> Result<()> {
        self.remove(&at(id, exec, "")).await
    }
}
