//! Things that `bench` and `demo` make on a node, and remove again.
//!
//! Everything carries one label, children and snapshots by inheritance. So what is removed in the end is found
//! on the node itself: also a sandbox whose making was interrupted before its id came back.

use crate::exit::Failure;
use keiki_client::{Client, Error, SandboxId, api::CreateSandbox};
use std::{collections::BTreeMap, time::Duration};

const KEY: &str = "keiki.run";

/// A machine in the middle of something answers 409 or 503; how often and how long to wait for it.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);

/// One run and what belongs to it.
pub struct Owned {
    client: Client,
    label: String,
}

impl Owned {
    /// A new run, e.g. of `bench`.
    pub fn new(client: Client, what: &str) -> Self {
        // Any id that is new for ever does.
        Self { client, label: format!("{what}-{}", SandboxId::new()) }
    }

    /// A create that belongs to this run. Should this program be killed, the TTL removes what it made.
    pub fn request(&self) -> CreateSandbox {
        CreateSandbox {
            metadata: Some(BTreeMap::from([(KEY.to_owned(), self.label.clone())])),
            ttl_seconds: Some(900),
            ..Default::default()
        }
    }

    /// Removes everything of this run.
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
