//! What `bench` and `demo` create on a node, and delete again.
//!
//! Everything carries one label; children and snapshots inherit it. So the node itself knows what
//! to delete, even a sandbox whose creation was interrupted before its id came back.

use crate::exit::Failure;
use keiki_client::{Client, Error, SandboxId, api::CreateSandbox};
use std::{collections::BTreeMap, time::Duration};

const KEY: &str = "keiki.run";

/// A busy machine answers 409 or 503.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);

/// One run and what it created.
pub struct Owned {
    client: Client,
    label: String,
}

impl Owned {
    pub fn new(client: Client, what: &str) -> Self {
        // Any unique id will do.
        Self { client, label: format!("{what}-{}", SandboxId::new()) }
    }

    /// A create request of this run. If this program is killed, the TTL cleans up.
    pub fn request(&self) -> CreateSandbox {
        CreateSandbox {
            metadata: Some(BTreeMap::from([(KEY.to_owned(), self.label.clone())])),
            ttl_seconds: Some(900),
            ..Default::default()
        }
    }

    /// Deletes everything this run created.
    pub async fn clear(&self) -> Result<(), Failure> {
        let mut last = Ok(());
        for _ in 0..TRIES {
            last = self.clear_once().await;
            match &last {
                Ok(()) => break,
                Err(Error::Api { .. }) => tokio::time::sleep(PAUSE).await,
                Err(_) => break,
            }
        }
        Ok(last?)
    }

    fn is_mine(&self, metadata: &BTreeMap<String, String>) -> bool {
        metadata.get(KEY) == Some(&self.label)
    }

    async fn clear_once(&self) -> Result<(), Error> {
        let mut failed = None;
        let mut note = |outcome: Result<(), Error>| match outcome {
            Err(error) if !error.is_not_found() => failed = Some(error),
            _ => {}
        };
        for sandbox in self.client.list(false).await? {
            if self.is_mine(&sandbox.metadata) {
                note(self.client.delete(sandbox.id).await);
            }
        }
        for snapshot in self.client.snapshots(None).await? {
            if self.is_mine(&snapshot.metadata) {
                note(self.client.delete_snapshot(snapshot.id).await);
            }
        }
        failed.map_or(Ok(()), Err)
    }
}
