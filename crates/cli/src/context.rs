//! What every command gets: the client, the printer, and ids resolved.

use crate::{args::Global, exit::Failure, ids, printer::Printer};
use keiki_client::{Client, SandboxId, SnapshotId};

/// Of one run of `keiki`.
#[derive(Clone)]
pub struct Context {
    /// The node.
    pub client: Client,
    /// Where results go.
    pub out: Printer,
}

impl Context {
    /// From the options every command has.
    pub fn new(global: &Global) -> Result<Self, Failure> {
        let out = Printer::new(global.output);
        let mut client = Client::new(&global.url)?.on_retry(move |retry| {
            out.note(&format!("{}; trying again in {:.1} s", retry.message, retry.delay.as_secs_f64()));
        });
        if let Some(wait) = global.wait {
            client = client.with_retry_budget(wait);
        }
        if let Some(key) = &global.api_key {
            client = client.with_api_key(key);
        }
        Ok(Self { client, out })
    }

    /// The sandbox that `text` means.
    pub async fn sandbox_id(&self, text: &str) -> Result<SandboxId, Failure> {
        match self.sandbox_ids(&[text.to_owned()]).await?.first() {
            Some(id) => Ok(*id),
            None => Err(Failure::Usage("a sandbox id is missing".into())),
        }
    }

    /// The sandboxes that `texts` mean, all resolved before anything is done to one.
    pub async fn sandbox_ids(&self, texts: &[String]) -> Result<Vec<SandboxId>, Failure> {
        if let Ok(whole) = texts.iter().map(|text| text.parse()).collect() {
            return Ok(whole);
        }
        let known: Vec<SandboxId> = self.client.list(false).await?.iter().map(|sandbox| sandbox.id).collect();
        texts.iter().map(|text| ids::pick("sandbox", text, &known)).collect()
    }

    /// The command that `text` means, of those its sandbox knows.
    pub async fn exec_id(&self, id: SandboxId, text: &str) -> Result<String, Failure> {
        Ok(self.exec_ids(id, &[text.to_owned()]).await?.remove(0))
    }

    /// The commands that `texts` mean, one for each.
    pub async fn exec_ids(&self, id: SandboxId, texts: &[String]) -> Result<Vec<String>, Failure> {
        let execs = self.client.execs(id).await?;
        let known: Vec<&str> = execs.iter().map(|exec| exec.id.as_str()).collect();
        texts.iter().map(|text| ids::pick("command", text, &known).map(str::to_owned)).collect()
    }

    /// The snapshots that `texts` mean.
    pub async fn snapshot_ids(&self, texts: &[String]) -> Result<Vec<SnapshotId>, Failure> {
        if let Ok(whole) = texts.iter().map(|text| text.parse()).collect() {
            return Ok(whole);
        }
        let snapshots = self.client.snapshots(None).await?;
        let known: Vec<SnapshotId> = snapshots.iter().map(|snapshot| snapshot.id).collect();
        texts.iter().map(|text| ids::pick("snapshot", text, &known)).collect()
    }
}
