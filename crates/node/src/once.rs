//! Requests that are carried out once, however often they are sent.
//!
//! A caller whose connection broke does not know whether its sandbox was made. It names the request
//! (`Idempotency-Key`) and sends it again: the node carries the first one out, and answers later ones with what
//! that made. The name is written in the same transaction as what was made (`Records::put_made`), so a crash
//! between the two cannot be, and a request that failed leaves no name behind: sending it again tries again. Of two
//! at the same time the second waits for the first.

use crate::{key::Secret, records::RequestRecord};
use serde::Serialize;

/// A request with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Once {
    key: String,
    asked: String,
}

impl Once {
    /// The request `what` (its route) with these contents, under the name `name` that `caller` gave it. Callers
    /// do not share names.
    #[must_use]
    pub fn new(secret: &Secret, caller: &str, name: &str, what: &str, contents: &impl Serialize) -> Self {
        // Contents are plain data, which always serialises; the route alone would still tell requests apart.
        let contents = serde_json::to_vec(contents).unwrap_or_default();
        Self {
            key: digest(secret, &[caller.as_bytes(), name.as_bytes()]),
            asked: digest(secret, &[what.as_bytes(), &contents]),
        }
    }

    /// The key by which the node knows it.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Is the recorded request this one?
    #[must_use]
    pub fn is(&self, record: &RequestRecord) -> bool {
        record.asked == self.asked
    }

    /// The record of this request, with what it made.
    #[must_use]
    pub fn made(&self, made: impl IntoIterator<Item: ToString>) -> RequestRecord {
        let made = made.into_iter().map(|id| id.to_string()).collect();
        RequestRecord { key: self.key.clone(), asked: self.asked.clone(), made }
    }
}

/// One digest of several texts, none of which can pass for a part of its neighbour. A request may hold what can be
/// guessed: without the node's secret nobody tells from a digest whether a guess is right.
fn digest(secret: &Secret, parts: &[&[u8]]) -> String {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::Once;

    #[test]
    fn caller_and_name_make_the_key_route_and_contents_the_request() {
        let new = |caller: &str, name: &str, what: &str, contents: &i32| {
            Once::new(&[1; 32], caller, name, what, contents)
        };
        let once = new("ab", "c", "/v1/sandboxes", &1);
        let record = once.made(["m"]);
        assert_eq!(record.key, once.key());
        for (other, same_key, same_request) in [
            (new("ab", "c", "/v1/sandboxes", &1), true, true),
            (new("ab", "c", "/v1/sandboxes", &2), true, false),
            (new("ab", "c", "/v1/sandboxes/x/fork", &1), true, false),
            (new("a", "bc", "/v1/sandboxes", &1), false, true),
            (new("ab", "d", "/v1/sandboxes", &1), false, true),
        ] {
            assert_eq!((other.key() == once.key(), other.is(&record)), (same_key, same_request), "{other:?}");
        }
        // Of another node nothing fits.
        let other = Once::new(&[2; 32], "ab", "c", "/v1/sandboxes", &1);
        assert!(other.key() != once.key() && !other.is(&record));
    }
}
