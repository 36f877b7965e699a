//! Background commands.

use crate::{
    error::Result,
    exec::{ExecStream, output},
    sandboxes::path,
    transport::Client,
};
use bytes::Bytes;
use keiki_types::{
    SandboxId,
    api::execs::{Exec, ExecList, InputTaken, Signal, SignalExec, StartExec},
};
use reqwest::{Body, Method};

/// Where to start reading the output of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// At these offsets of standard output and standard error.
    Offsets(u64, u64),
    /// This many bytes before the end of each.
    Tail(u64),
}

fn at(id: SandboxId, exec: &str, rest: &str) -> String {
    path(id, &format!("/execs/{exec}{rest}"))
}

impl Client {
    /// Starts a command in the background.
    pub async fn start_exec(&self, id: SandboxId, request: &StartExec) -> Result<Exec> {
        self.post(&path(id, "/execs"), request).await
    }

    /// Running and recently exited commands, oldest first.
    pub async fn execs(&self, id: SandboxId) -> Result<Vec<Exec>> {
        self.get::<ExecList>(&path(id, "/execs")).await.map(|list| list.items)
    }

    pub async fn get_exec(&self, id: SandboxId, exec: &str) -> Result<Exec> {
        self.get(&at(id, exec, "")).await
    }

    /// Reads the output of a command to its end. Dropping the stream leaves the command running.
    pub async fn attach_exec(&self, id: SandboxId, exec: &str, from: From) -> Result<ExecStream> {
        let query = match from {
            From::Offsets(out, err) => vec![("stdout_offset", out), ("stderr_offset", err)],
            From::Tail(bytes) => vec![("tail", bytes)],
        };
        let request = self.request(Method::GET, &at(id, exec, "/stream")).query(&query);
        self.events_of(request).await.map(output)
    }

    /// Sends a signal to every process of a command.
    pub async fn signal_exec(&self, id: SandboxId, exec: &str, signal: Signal) -> Result<()> {
        let request = self.request(Method::POST, &at(id, exec, "/signal")).json(&SignalExec { signal });
        self.send(request).await.map(drop)
    }

    /// Writes to a command's standard input or terminal; `eof` closes it. Returns how much was
    /// accepted.
    pub async fn write_exec(&self, id: SandboxId, exec: &str, data: Bytes, eof: bool) -> Result<u64> {
        let request = self.request(Method::POST, &at(id, exec, "/stdin")).query(&[("eof", eof)]);
        self.json::<InputTaken>(request.body(Body::from(data))).await.map(|taken| taken.bytes)
    }

    /// Kills a command, if it still runs, and forgets it.
    pub async fn remove_exec(&self, id: SandboxId, exec: &str) -> Result<()> {
        self.remove(&at(id, exec, "")).await
    }
}
