//! A sandbox as tests like to use it: short words, and a failed command is a failed test.

use anyhow::{Context, Result, ensure};
use keiki_client::Client;
use keiki_types::{
    SandboxId,
    api::{self, CreateSandbox, ExecRequest, ExecResult, ForkSandbox, Snapshot},
};

/// One sandbox.
#[derive(Clone)]
pub struct Sandbox {
    /// The node.
    pub client: Client,
    /// Id.
    pub id: SandboxId,
}

impl Sandbox {
    /// A fresh one from the base template.
    pub async fn create(client: &Client) -> Result<Self> {
        let made = client.create(&CreateSandbox::default()).await?;
        Ok(Self { client: client.clone(), id: made.id })
    }

    /// One restored from a snapshot.
    pub async fn restore(client: &Client, snapshot: &Snapshot) -> Result<Self> {
        let made = client.restore(snapshot.id, CreateSandbox::default()).await?;
        Ok(Self { client: client.clone(), id: made.id })
    }

    /// Children of it.
    pub async fn fork(&self, count: i64) -> Result<Vec<Self>> {
        let request = ForkSandbox { count: Some(count), ..ForkSandbox::default() };
        let forked = self.client.fork(self.id, &request).await?;
        ensure!(forked.children.len() == usize::try_from(count)?, "{} children", forked.children.len());
        Ok(forked.children.iter().map(|child| Self { client: self.client.clone(), id: child.id }).collect())
    }

    /// One child.
    pub async fn fork_one(&self) -> Result<Self> {
        self.fork(1).await?.pop().context("no child")
    }

    /// A snapshot of it.
    pub async fn snapshot(&self) -> Result<Snapshot> {
        Ok(self.client.snapshot(self.id).await?)
    }

    /// Runs a shell line; returns what it wrote, without the last newline. It must succeed.
    pub async fn sh(&self, line: &str) -> Result<String> {
        let done = self.exec(line).await?;
        ensure!(
            done.exit_code == 0,
            "`{line}` in {} exited with {}: {}{}",
            self.id,
            done.exit_code,
            done.stdout,
            done.stderr
        );
        Ok(done.stdout.trim_end_matches('\n').to_owned())
    }

    /// Runs a shell line.
    pub async fn exec(&self, line: &str) -> Result<ExecResult> {
        let request = ExecRequest { cmd: Some(line.into()), ..ExecRequest::default() };
        self.client.exec(self.id, &request).await.with_context(|| format!("`{line}` in {}", self.id))
    }

    /// Starts a process that outlives the call.
    pub async fn background(&self, line: &str) -> Result<()> {
        let quoted = line.replace('\'', r"'\''");
        self.sh(&format!("setsid sh -c '{quoted}' >/dev/null 2>&1 </dev/null &")).await.map(drop)
    }

    /// Everything about it.
    pub async fn view(&self) -> Result<api::Sandbox> {
        Ok(self.client.sandbox(self.id).await?)
    }

    /// Ends it.
    pub async fn kill(&self) -> Result<()> {
        Ok(self.client.delete(self.id).await?)
    }
}
