//! Requests that are carried out once, however often they are sent.
//!
//! A caller whose connection broke does not know whether its sandbox was made. It names the request
//! (`Idempotency-Key`) and sends it again: the node carries the first one out and answers later ones with what
//! that made. The name is written in the same transaction as what was made (`Records::put_made`), so a crash
//! between the two cannot be, and a request that failed leaves no name behind: sending it again tries again. Of two
//! at the same time the second waits for the first.

pub use keiki_api::Once;

use crate::records::RequestRecord;

/// Is the recorded request this one?
pub fn is_recorded(once: &Once, record: &RequestRecord) -> bool {
    record.asked == once.request()
}

/// The record of a request, with what it made.
pub fn record(once: &Once, made: impl IntoIterator<Item: ToString>) -> RequestRecord {
    let made = made.into_iter().map(|id| id.to_string()).collect();
    RequestRecord { key: once.key().into(), asked: once.request().into(), made }
}
