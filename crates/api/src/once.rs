//! Requests that are carried out once, however often they are sent.

use serde::Serialize;

/// Random bytes that only the node knows.
pub type Secret = [u8; 32];

/// A request with a name (`Idempotency-Key`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Once {
    /// Digest of the caller and the name.
    pub key: String,
    /// Digest of the route and the contents.
    pub request: String,
}

impl Once {
    /// The request to `route` with these contents, which `caller` named `name`. Callers do not share names.
    pub fn new(secret: &Secret, caller: &str, name: &str, route: &str, contents: &impl Serialize) -> Self {
        // Contents are plain data, which always serialises; the route alone would still tell requests apart.
        let contents = serde_json::to_vec(contents).unwrap_or_default();
        Self {
            key: digest(secret, &[caller.as_bytes(), name.as_bytes()]),
            request: digest(secret, &[route.as_bytes(), &contents]),
        }
    }
}

/// One digest of several texts, none of which can pass for a part of its neighbour. A request may
/// hold what can be guessed: without the node's secret a guess cannot be checked against a digest.
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
        let new = |caller: &str, name: &str, route: &str, contents: &i32| {
            Once::new(&[1; 32], caller, name, route, contents)
        };
        let once = new("ab", "c", "/v1/sandboxes", &1);
        for (other, same_key, same_request) in [
            (new("ab", "c", "/v1/sandboxes", &1), true, true),
            (new("ab", "c", "/v1/sandboxes", &2), true, false),
            (new("ab", "c", "/v1/sandboxes/x/fork", &1), true, false),
            (new("a", "bc", "/v1/sandboxes", &1), false, true),
            (new("ab", "d", "/v1/sandboxes", &1), false, true),
        ] {
            let same = (other.key == once.key, other.request == once.request);
            assert_eq!(same, (same_key, same_request), "{other:?}");
        }
        // Of another node nothing fits.
        let other = Once::new(&[2; 32], "ab", "c", "/v1/sandboxes", &1);
        assert!(other.key != once.key && other.request != once.request);
    }
}
