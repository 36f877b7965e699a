//! What can go wrong with slots.

use crate::cidr::Cidr;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with slots.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a step.
    #[error("cannot {doing}")]
    Io {
        /// The step.
        doing: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The kernel refused a netlink request.
    #[error("cannot {doing}")]
    Netlink {
        /// The step.
        doing: String,
        /// Why.
        #[source]
        source: rtnetlink::Error,
    },
    /// nftables refused a ruleset.
    #[error("nft refused the rules of {of}: {said}")]
    Rules {
        /// Whose.
        of: String,
        /// Its own words.
        said: String,
    },
    /// The range cannot hold slots.
    #[error("slot range {0} must be a /8 to /28 network with no host bits set")]
    Range(Cidr),
    /// The range is in use.
    #[error("slot range {range} collides with {with}; choose another range for this node")]
    Collision {
        /// What was asked for.
        range: Cidr,
        /// What is there.
        with: String,
    },
    /// The tag is not one.
    #[error("a node tag is 4 to 6 lower-case hexadecimal characters, not `{0}`")]
    Tag(String),
    /// Another process has this tag's slots.
    #[error("another process runs the slots of this state directory")]
    Locked,
    /// No slot is free.
    #[error("all {0} slots of the range are in use")]
    Exhausted(u32),
    /// An adopted slot's namespace does not exist any more.
    #[error("the network namespace of slot {0} is gone")]
    Gone(u16),
    /// The pool was stopped.
    #[error("the slots were stopped")]
    Stopped,
    /// The slot is someone's already, or outside the range.
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
