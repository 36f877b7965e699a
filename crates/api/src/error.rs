//! Why the node refused or failed: a sentence for the client, an HTTP status, and causes for the log.

use std::time::Duration;

/// The result of a call of the API.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// `Display` is the sentence for the client; [`Error::Internal`] keeps its causes for the log.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// 400: the request is invalid; the sentence names the field.
    #[error("{0}")]
    Invalid(String),
    /// 401.
    #[error("missing or wrong API key: send `Authorization: Bearer <key>`")]
    Unauthorized,
    /// 403: the request comes from a web page that must not send it.
    #[error("{0}")]
    Forbidden(String),
    /// 404.
    #[error("{0}")]
    NotFound(String),
    /// 409: the state does not allow it.
    #[error("{0}")]
    Conflict(String),
    /// 409: its machine has failed.
    #[error("{what}")]
    Failed {
        /// One sentence.
        what: String,
        /// The end of the guest's console.
        console: Option<String>,
    },
    /// 408: the request's body stopped arriving.
    #[error("{0}")]
    Slow(String),
    /// 413.
    #[error("{0}")]
    TooLarge(String),
    /// 422: the `Idempotency-Key` belongs to another request.
    #[error("{0}")]
    KeyTaken(String),
    /// 502: nothing in the sandbox answers on that port.
    #[error("{0}")]
    Unreachable(String),
    /// 503 with `Retry-After`: nothing was created, try again.
    #[error("{why}")]
    Busy {
        /// One sentence.
        why: String,
        /// How long to wait.
        retry_after: Duration,
    },
    /// 504: the command or the guest took too long.
    #[error("{0}")]
    Timeout(String),
    /// 507: not enough memory or disk for the whole request; nothing was created.
    #[error("{0}")]
    NoRoom(String),
    /// 500.
    #[error("{what}")]
    Internal {
        /// One sentence.
        what: String,
        /// The end of the guest's console, if it helps.
        console: Option<String>,
        /// What caused it.
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
