//! Named requests, carried out once (see [`crate::once`]).

use super::Inner;
use crate::{
    error::{Error, Result},
    once::{Once, is_recorded},
};
use tokio::sync::OwnedRwLockWriteGuard;

/// Held by a named request: others of its name wait.
type Permit = Option<OwnedRwLockWriteGuard<()>>;

impl Inner {
    /// Carries out a verb, unless a request of this name did it before: then the answer is `again` of what that made.
    pub(super) async fn once<T>(
        &self,
        once: Option<&Once>,
        verb: impl Future<Output = Result<T>>,
        again: impl AsyncFnOnce(Vec<String>) -> Result<T>,
    ) -> Result<T> {
        let (_permit, made) = self.permit(once).await?;
        match made {
            Some(made) => again(made).await,
            None => verb.await,
        }
    }

    /// Waits for others of its name; then tells what the first of them made, if it was carried out.
    async fn permit(&self, once: Option<&Once>) -> Result<(Permit, Option<Vec<String>>)> {
        let Some(once) = once else { return Ok((None, None)) };
        let permit = self.requests.of(once.key().into()).write_owned().await;
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
        Ok((Some(permit), made))
    }
}
