//! Errors of KVM, of guest memory, and of saved states.

use std::io;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} failed")]
    Call(&'static str, #[source] io::Error),
    /// This host refuses the value of a model-specific register.
    #[error("KVM on this host refuses the value of MSR {0:#x}")]
    Msr(u32),
    /// The host lacks something that every machine needs.
    #[error("KVM on this host has no {0}")]
    Missing(&'static str),
    /// A saved state cannot be restored. The sentence says which part and why.
    #[error("{0}")]
    State(String),
    /// The processor lacks features that the machine was started with.
    #[error("the processor of this host lacks {0}, which the machine was started with")]
    Features(String),
    #[error("guest memory of {0} bytes: not a multiple of 4096 between 1 MiB and 64 GiB")]
    Size(u64),
    /// vCPUs did not stop in time.
    #[error("{0} of {1} vCPUs did not stop within {2} ms")]
    Park(usize, usize, u128),
    #[error("the page map belongs to another process")]
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
