//! The verbs that make things, for requests with a name: carried out once (see [`crate::once`]).

use super::Inner;
use crate::{
    error::{Error, Result},
    once::{Once, is_recorded},
};
use keiki_types::{
    SandboxId, SnapshotId,
    api::{self, CreateSandbox, ForkSandbox, Forked},
};
use std::{collections::BTreeMap, sync::Arc};
use tokio::sync::OwnedRwLockWriteGuard;

/// The turn of a named request: others of its name wait.
type Turn = Option<OwnedRwLockWriteGuard<()>>;

impl Inner {
    pub(super) async fn create_once(
        self: &Arc<Self>,
        asked: CreateSandbox,
        once: Option<Once>,
    ) -> Result<api::Sandbox> {
        let (_turn, made) = self.turn(once.as_ref()).await?;
        match made {
            Some(made) => self.made_sandboxes(&made)?.pop().ok_or_else(gone),
            None => self.create(asked, once.as_ref()).await,
        }
    }

    pub(super) async fn fork_once(
        self: &Arc<Self>,
        id: SandboxId,
        asked: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<Once>,
    ) -> Result<Forked> {
        let (_turn, made) = self.turn(once.as_ref()).await?;
        let Some(made) = made else { return self.fork(id, asked, labels, once.as_ref()).await };
        let children = self.made_sandboxes(&made)?;
        let sandbox = children.first().cloned().ok_or_else(gone)?;
        // Of the whole fork no times were kept; the first child's are those of its part.
        let timings = sandbox.timings.clone().unwrap_or_default();
        Ok(Forked { parent_id: id, sandbox, children, timings })
    }

    pub(super) async fn snapshot_once(
        self: &Arc<Self>,
        id: SandboxId,
        once: Option<Once>,
    ) -> Result<api::Snapshot> {
        let (_turn, made) = self.turn(once.as_ref()).await?;
        let Some(made) = made else { return self.snapshot(id, once.as_ref()).await };
        let id: SnapshotId = made.first().and_then(|id| id.parse().ok()).ok_or_else(gone)?;
        match self.snapshot_record(id).await {
            Err(Error::NotFound(_)) => Err(gone()),
            found => Ok(self.snapshot_view(&found?)),
        }
    }

    /// Waits for others of its name; then says what the first of them made, if it was carried out.
    async fn turn(&self, once: Option<&Once>) -> Result<(Turn, Option<Vec<String>>)> {
        let Some(once) = once else { return Ok((None, None)) };
        let turn = self.requests.of(once.key().into()).write_owned().await;
        let made = match self.records.request(once.key()).await? {
            None => None,
            Some(record) if is_recorded(once, &record) => Some(record.made),
            Some(_) => {
                return Err(Error::KeyTaken(
                    "this Idempotency-Key was used for another request: send a new key with a new request"
                        .into(),
                ));
            }
        };
        Ok((Some(turn), made))
    }

    /// What a request made, as it is now.
    fn made_sandboxes(&self, made: &[String]) -> Result<Vec<api::Sandbox>> {
        let view = |id: &String| {
            let id: SandboxId = id.parse().map_err(|_| gone())?;
            Ok(self.sandbox(id).map_err(|_| gone())?.view())
        };
        made.iter().map(view).collect()
    }
}

fn gone() -> Error {
    Error::Conflict(
        "the request with this Idempotency-Key was carried out, and what it made has been deleted since: \
         send a new key to make another"
            .into(),
    )
}
