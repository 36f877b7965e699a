//! What every command needs: the client, the printer, and ids by their short forms.

use crate::{
    env,
    exit::Failure,
    ids,
    printer::{Format, Printer},
    text::parse_duration,
};
use keiki_client::{Client, SandboxId, SnapshotId};
use std::time::Duration;

/// Heading of the options that every command has.
const GLOBAL: &str = "Global options";

#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Address of the node
    #[arg(long, global = true, help_heading = GLOBAL, default_value = "http://127.0.0.1:7777")]
    #[arg(env = env::URL, hide_env_values = true)]
    pub url: String,
    /// API key for the node
    #[arg(long, global = true, help_heading = GLOBAL, env = env::API_KEY, hide_env_values = true)]
    pub api_key: Option<String>,
    /// Output format
    #[arg(short, long, global = true, help_heading = GLOBAL, value_enum, default_value_t)]
    pub output: Format,
    /// How long to retry a create or fork while the node has no room [default: 60s]
    #[arg(long, global = true, help_heading = GLOBAL)]
    #[arg(value_name = "DURATION", value_parser = parse_duration)]
    pub wait: Option<Duration>,
}

/// What every command needs. Cheap to clone.
#[derive(Clone)]
pub struct Context {
    pub client: Client,
    pub out: Printer,
}

impl Context {
    pub fn new(global: &Global) -> Result<Self, Failure> {
        let out = Printer::new(global.output);
        let mut client = Client::new(&global.url)?.on_retry(move |retry| {
            out.note(&format!("{}; retrying in {:.1} s", retry.message, retry.delay.as_secs_f64()));
        });
        if let Some(wait) = global.wait {
            client = client.with_retry_budget(wait);
        }
        if let Some(key) = &global.api_key {
            client = client.with_api_key(key);
        }
        Ok(Self { client, out })
    }

    /// The sandbox that `text` names.
    pub async fn sandbox_id(&self, text: &str) -> Result<SandboxId, Failure> {
        Ok(self.sandbox_ids(&[text.to_owned()]).await?.remove(0))
    }

    /// The sandboxes that `texts` name, in their order.
    pub async fn sandbox_ids(&self, texts: &[String]) -> Result<Vec<SandboxId>, Failure> {
        if let Ok(whole) = texts.iter().map(|text| text.parse()).collect() {
            return Ok(whole);
        }
        let known: Vec<SandboxId> = self.client.list(false).await?.iter().map(|sandbox| sandbox.id).collect();
        texts.iter().map(|text| ids::pick("sandbox", text, &known)).collect()
    }

    /// The command in a sandbox that `text` names.
    pub async fn exec_id(&self, id: SandboxId, text: &str) -> Result<String, Failure> {
        Ok(self.exec_ids(id, &[text.to_owned()]).await?.remove(0))
    }

    /// The commands in a sandbox that `texts` name, in their order.
    pub async fn exec_ids(&self, id: SandboxId, texts: &[String]) -> Result<Vec<String>, Failure> {
        let execs = self.client.execs(id).await?;
        let known: Vec<&str> = execs.iter().map(|exec| exec.id.as_str()).collect();
        texts.iter().map(|text| ids::pick("command", text, &known).map(str::to_owned)).collect()
    }

    /// The snapshot that `text` names.
    pub async fn snapshot_id(&self, text: &str) -> Result<SnapshotId, Failure> {
        Ok(self.snapshot_ids(&[text.to_owned()]).await?.remove(0))
    }

    /// The snapshots that `texts` name, in their order.
    pub async fn snapshot_ids(&self, texts: &[String]) -> Result<Vec<SnapshotId>, Failure> {
        if let Ok(whole) = texts.iter().map(|text| text.parse()).collect() {
            return Ok(whole);
        }
        let snapshots = self.client.snapshots(None).await?;
        let known: Vec<SnapshotId> = snapshots.iter().map(|snapshot| snapshot.id).collect();
        texts.iter().map(|text| ids::pick("snapshot", text, &known)).collect()
    }
}
