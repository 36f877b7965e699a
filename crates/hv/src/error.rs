//! What can go wrong between us and KVM.

use std::io;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of KVM, of guest memory, or of a state that does not fit.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} failed")]
    Call(&'static str, #[source] io::Error),
    /// A model-specific register has a value that this host does not take.
    #[error("the host's KVM refuses the value of MSR {0:#x}")]
    Msr(u32),
    /// The host lacks something that every machine needs.
    #[error("KVM of this host has no {0}")]
    Missing(&'static str),
    /// A saved state asks for what is not possible; the sentence says which part and why.
    #[error("{0}")]
    State(String),
    /// The processor that a machine was frozen on has features that this one has not.
    #[error("this host's processor has no {0}, which the machine was started with")]
    Features(String),
    /// Guest RAM of this size cannot be laid out.
    #[error("guest memory of {0} bytes: not a multiple of 4096 between 1 MiB and 64 GiB")]
    Size(u64),
    /// vCPUs did not stop in time.
    #[error("{0} of {1} vCPUs did not stop within {2} ms")]
    Park(usize, usize, u128),
    /// The page map that was handed over belongs to another process.
    #[error("the page map that was handed over is not this process's own")]
    ForeignPagemap,
}

impl Error {
    pub(crate) fn errno(call: &'static str) -> impl FnOnce(vmm_sys_util::errno::Error) -> Self {
        move |error| Self::Call(call, io::Error::from_raw_os_error(error.errno()))
    }

    pub(crate) fn io(call: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Call(call, error)
    }
}
