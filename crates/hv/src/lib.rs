//! KVM, guest memory and fork behind a small safe interface.
//!
//! ```text
//!   Kvm ── create_vm(GuestRam) ──> Vm ── create_vcpu(CpuModel) ──> Vcpu ──┐
//!                                                                        ▼
//!   Bus: devices, called on vCPU threads  <──────────────────────────  Cpus: run, park
//!
//!   freeze   Cpus::park, Cpus::save, Vm::save, fork: the copy keeps GuestRam and the states
//!   thaw     fork: in the copy a new Vm over the same GuestRam, states restored, Cpus::run
//!   persist  GuestRam::write_private: what differs from the base file
//! ```
//!
//! Guest memory is private to a process, and fork(2) copies it on write. The rest of a machine is
//! small and plain data ([`state`]).

pub mod cpuid;
mod cpus;
mod error;
pub mod fork;
mod memory;
mod private;
pub mod state;
mod vcpu;
mod vm;

pub use cpus::{Cpus, install_kick};
pub use error::{Error, Result};
pub use kvm_bindings;
pub use memory::{BLOCK, GuestRam, HOLE, HugePages, Memory, Span, layout};
pub use private::Written;
pub use vcpu::{Bus, End, Exit, Vcpu};
pub use vm::{Kvm, Vm};
