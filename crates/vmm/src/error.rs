//! Errors of a monitor, and how it reports them to the node.

use keiki_control::{ControlError, FailureKind, Reply};
use std::io;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is invalid, or not possible now.
    #[error("{0}")]
    Invalid(String),
    /// The files are damaged, or belong to another version or machine.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Hv(#[from] keiki_hv::Error),
    #[error(transparent)]
    Boot(#[from] crate::boot::Error),
    #[error(transparent)]
    Device(#[from] keiki_devices::StateError),
    #[error(transparent)]
    Disk(#[from] keiki_devices::disk::DiskError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("{0}")]
    Host(&'static str, #[source] io::Error),
}

impl Error {
    /// For `map_err`: names what was being done.
    pub(crate) fn host(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Host(doing, error)
    }

    fn kind(&self) -> FailureKind {
        use keiki_hv::Error as Hv;
        match self {
            Self::Invalid(_) | Self::Control(_) | Self::Hv(Hv::Size(_)) => FailureKind::Invalid,
            Self::Refused(_) | Self::Device(_) | Self::Hv(Hv::State(_) | Hv::Features(_) | Hv::Msr(_)) => {
                FailureKind::Refused
            }
            _ if is_full(self) => FailureKind::NoSpace,
            Self::Disk(_) | Self::Boot(_) => FailureKind::Refused,
            Self::Hv(_) | Self::Host(..) => FailureKind::Host,
        }
    }

    /// The reply to the node: one sentence with its causes.
    pub(crate) fn reply(&self) -> Reply {
        Reply::Failed { kind: self.kind(), sentence: keiki_sys::error_chain(self) }
    }
}

fn is_full(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        if error.downcast_ref::<io::Error>().is_some_and(|error| full.contains(&error.kind())) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::Error;
    use keiki_control::{FailureKind, Reply};
    use std::io;

    #[test]
    fn the_node_hears_a_sentence_and_a_kind() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let Reply::Failed { kind, sentence } = Error::Host("writing the state file", full).reply() else {
            panic!("a failure is a failure")
        };
        assert_eq!(kind, FailureKind::NoSpace);
        assert_eq!(sentence, "writing the state file: No space left on device (os error 28)");
        let features = Error::from(keiki_hv::Error::Features("avx2".into()));
        assert_eq!(features.kind(), FailureKind::Refused);
        assert_eq!(Error::Invalid("x".into()).kind(), FailureKind::Invalid);
    }
}
