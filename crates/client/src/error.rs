//! What can go wrong between a caller and a node.

use std::time::Duration;

/// Result of the client.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The node refused or failed, and said so.
    #[error("{message}")]
    Api {
        /// HTTP status.
        status: u16,
        /// The node's sentence.
        message: String,
        /// Tail of the guest's console, where the node sent it.
        console: Option<String>,
        /// When the node asks to try again.
        retry_after: Option<Duration>,
    },
    /// The address is not usable.
    #[error("{url:?} is no address of a node: {why}")]
    Address {
        /// As given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// No node answers there.
    #[error("no node answers at {url} (is `keiki node` running? KEIKI_URL says where)")]
    Unreachable {
        /// Base URL.
        url: String,
        /// The cause.
        #[source]
        source: reqwest::Error,
    },
    /// The connection broke.
    #[error("the connection to the node failed")]
    Transport(#[source] reqwest::Error),
    /// The connection of a terminal or a port broke.
    #[error("the connection to the sandbox failed")]
    Socket(#[source] Box<tokio_tungstenite::tungstenite::Error>),
    /// The node answered something this client does not understand.
    #[error("the node's answer was not understood: {0}")]
    Protocol(String),
    /// The connection to a port was reset inside.
    #[error("{0}")]
    Connection(String),
    /// A command that was started could not be carried to its end.
    #[error("{0}")]
    Command(String),
    /// A command's time was up and it was killed.
    #[error("{0}")]
    CommandTimeout(String),
    /// The stream of a command ended without its exit code: its machine or the node is gone.
    #[error("the command's output ended without an exit code: the sandbox or the node went away")]
    Interrupted,
}

impl Error {
    /// HTTP status of the node's refusal, if it is one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Api { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Is what was asked for not there?
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
    }

    /// Was time up: of a command, or of the guest?
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
