//! Errors of this crate.

use crate::cidr::Cidr;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on slots failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a step.
    #[error("cannot {doing}")]
    Io {
        /// What failed.
        doing: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The kernel refused a netlink request.
    #[error("cannot {doing}")]
    Netlink {
        /// What failed.
        doing: String,
        /// The cause.
        #[source]
        source: rtnetlink::Error,
    },
    /// nft rejected a ruleset.
    #[error("nft rejected the rules of {of}: {said}")]
    Rules {
        /// The owner of the rules.
        of: String,
        /// The first line of its message.
        said: String,
    },
    /// The range cannot hold slots.
    #[error("slot range {0} must be a /8 to /28 network")]
    Range(Cidr),
    /// The range is in use.
    #[error("slot range {range} collides with {with}; choose another range for this node")]
    Collision {
        /// The configured range.
        range: Cidr,
        /// What it collides with.
        with: String,
    },
    /// Not a node tag.
    #[error("a node tag is 4 to 6 lower-case hexadecimal characters, not `{0}`")]
    Tag(String),
    /// Another process holds the lock.
    #[error("another process uses the slots of this state directory")]
    Locked,
    /// No slot is free.
    #[error("all {0} slots of the range are in use")]
    Exhausted(u32),
    /// The namespace of an adopted slot is gone.
    #[error("the network namespace of slot {0} is gone")]
    Gone(u16),
    /// The pool is stopped.
    #[error("the slots are stopped")]
    Stopped,
    /// The slot is taken or outside the range.
    #[error("slot {0} is taken or outside the range")]
    Taken(u16),
}

impl Error {
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    pub(crate) fn netlink(doing: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Netlink { doing, source }
    }
}
