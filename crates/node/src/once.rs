//! Requests that are carried out once, however often they are sent.
//!
//! A caller whose connection broke does not know whether its sandbox was created. It names the
//! request (`Idempotency-Key`) and sends it again: the node carries out the first one and answers
//! later ones with its result. The name is written in the same transaction as the result
//! (`Records::put_made`), so no crash can come between the two. A failed request leaves no name
//! behind: a retry runs again. Of two concurrent requests the second waits for the first.

use crate::{
    daemon::Inner,
    error::{Error, Result},
    records::RequestRecord,
};
pub use keiki_api::Once;

impl Inner {
    /// Carries out a verb, unless a request with this name did so before: then the result is
    /// `again` of what that one created.
    pub(crate) async fn once<T>(
        &self,
        once: Option<&Once>,
        verb: impl Future<Output = Result<T>>,
        again: impl AsyncFnOnce(Vec<String>) -> Result<T>,
    ) -> Result<T> {
        let Some(once) = once else { return verb.await };
        // Others of its name wait.
        let _permit = self.requests.claim(&once.key).await;
        match self.journal.records.request(&once.key).await? {
            None => verb.await,
            Some(record) if record.asked == once.request => again(record.made).await,
            Some(_) => Err(Error::KeyTaken(
                "this Idempotency-Key was used for another request: send a new key with a new request".into(),
            )),
        }
    }
}

/// The record of a request, with what it created.
pub fn record(once: &Once, made: impl IntoIterator<Item: ToString>) -> RequestRecord {
    let made = made.into_iter().map(|id| id.to_string()).collect();
    RequestRecord { key: once.key.clone(), asked: once.request.clone(), made }
}
