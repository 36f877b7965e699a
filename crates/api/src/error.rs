//! Why the node refused or failed: one sentence for the client, an HTTP status, and the causes for the log.

use std::time::Duration;

/// Result of the node.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the API answers with. `Display` is the sentence the client reads; [`Error::Internal`] keeps its causes
/// for the log.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// 400: the request is wrong; the sentence names the field.
    #[error("{0}")]
    Invalid(String),
    /// 401.
    #[error("missing or wrong API key: send `Authorization: Bearer <key>`")]
    Unauthorized,
    /// 403: the key may be right, but the request comes from where it must not.
    #[error("{0}")]
    Forbidden(String),
    /// 404.
    #[error("{0}")]
    NotFound(String),
    /// 409: the state does not allow it.
    #[error("{0}")]
    Conflict(String),
    /// 409: its machine has ended by itself.
    #[error("{what}")]
    Failed {
        /// One sentence.
        what: String,
        /// The end of the guest's console.
        console: Option<String>,
    },
    /// 408: the request's body does not come.
    #[error("{0}")]
    Slow(String),
    /// 413.
    #[error("{0}")]
    TooLarge(String),
    /// 422: the `Idempotency-Key` is another request's.
    #[error("{0}")]
    KeyTaken(String),
    /// 502: the sandbox is there, but nothing answers in it where it was asked.
    #[error("{0}")]
    Unreachable(String),
    /// 503 with `Retry-After`: nothing was made, try again.
    #[error("{why}")]
    Busy {
        /// One sentence.
        why: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// 504: the command or the guest took too long.
    #[error("{0}")]
    Timeout(String),
    /// 507: not enough RAM or disk for the whole request; nothing was made.
    #[error("{0}")]
    NoRoom(String),
    /// 500.
    #[error("{what}")]
    Internal {
        /// One sentence.
        what: String,
        /// The end of the guest's console, where that tells more.
        console: Option<String>,
        /// What led to it.
        #[source]
        cause: anyhow::Error,
    },
}

impl Error {
    /// A 500 with its cause.
    pub fn internal(what: impl Into<String>, cause: impl Into<anyhow::Error>) -> Self {
        Self::Internal { what: what.into(), console: None, cause: cause.into() }
    }
}
