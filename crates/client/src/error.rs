//! Errors of the client.

use std::time::Duration;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The node refused the request, or failed.
    #[error("{message}")]
    Api {
        status: u16,
        message: String,
        /// Last lines of the guest's console, if the node sent them.
        console: Option<String>,
        /// How long the node asks to wait.
        retry_after: Option<Duration>,
    },
    /// The address cannot be used.
    #[error("not the address of a node: {url:?}: {why}")]
    Address { url: String, why: String },
    /// No node answers at the address.
    #[error("no node answers at {url} (is `keiki node` running? set KEIKI_URL to its address)")]
    Unreachable {
        url: String,
        #[source]
        source: reqwest::Error,
    },
    /// The connection to the node broke.
    #[error("the connection to the node failed")]
    Transport(#[source] reqwest::Error),
    /// The connection to a terminal or a port broke.
    #[error("the connection to the sandbox failed")]
    Socket(#[source] Box<tokio_tungstenite::tungstenite::Error>),
    /// This client does not understand the answer.
    #[error("cannot understand the node's answer: {0}")]
    Protocol(String),
    /// The sandbox reset the connection to a port.
    #[error("{0}")]
    Connection(String),
    /// A command failed after it was started.
    #[error("{0}")]
    Command(String),
    /// A command was killed by its timeout.
    #[error("{0}")]
    CommandTimeout(String),
    /// The output of a command ended without an exit code: its machine or the node is gone.
    #[error("the command's output ended without an exit code: the sandbox or the node is gone")]
    Interrupted,
}

impl Error {
    /// HTTP status, if the node answered.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Api { status, .. } => Some(*status),
            _ => None,
        }
    }

    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
    }

    /// Did a command or the guest time out?
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::CommandTimeout(_)) || self.status() == Some(504)
    }

    /// Tail of the guest's console, where the node sent it.
    #[must_use]
    pub fn console(&self) -> Option<&str> {
        match self {
            Self::Api { console, .. } => console.as_deref(),
            _ => None,
        }
    }
}
