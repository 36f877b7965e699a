//! The first boot: loads a kernel and everything it needs into guest memory. Afterwards a machine
//! only freezes and thaws.
//!
//! | file | does |
//! |---|---|
//! | `layout` | addresses, interrupts, memory map: pure; a running machine is wired by them too |
//! | `kernel` | bzImage or ELF, initramfs, command line, boot parameters |
//! | `acpi` | how the guest finds vCPUs and devices |
//! | `entry` | the registers of the first vCPU; the others wait for a start-up interrupt |
//!
//! Kernel and initramfs come from the node and may belong to a user. They are checked, and an error
//! says what is wrong with them.

mod acpi;
mod entry;
mod kernel;
pub mod layout;

pub use entry::Entry;

use keiki_hv::GuestRam;
use std::fs::File;
use vm_memory::{Bytes, GuestAddress};

/// Why a machine cannot boot.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} vCPUs: a machine has 1 to {max}", max = layout::MAX_VCPUS)]
    Vcpus(u8),
    #[error("{0} devices: there is room for {max}", max = layout::MAX_DEVICES)]
    Devices(usize),
    #[error("the kernel cannot be booted: {0}")]
    Kernel(String),
    #[error("the initramfs cannot be read")]
    Initramfs(#[source] std::io::Error),
    #[error(
        "the machine has {has_mib} MiB of memory, its kernel and initramfs need {needs_mib} MiB to start"
    )]
    Memory { has_mib: u64, needs_mib: u64 },
    #[error("the command line {0}")]
    CommandLine(String),
    #[error("guest memory cannot be written at {0:#x}")]
    Write(u64),
}

#[derive(Debug)]
pub struct Spec<'a> {
    /// bzImage, or ELF with a PVH or 64-bit entry.
    pub kernel: &'a mut File,
    pub initramfs: Option<&'a mut File>,
    pub command_line: &'a str,
    pub vcpus: u8,
    /// Number of MMIO devices.
    pub devices: usize,
}

/// Fills guest memory and returns where the first vCPU starts.
///
/// # Errors
/// On error memory may hold a part of it.
pub fn load(ram: &GuestRam, spec: Spec) -> Result<Entry, Error> {
    let tables = acpi::tables(spec.vcpus, spec.devices)?;
    let entry = kernel::load(ram, spec.kernel, spec.initramfs, spec.command_line)?;
    put(ram, layout::ACPI, &tables)?;
    entry::put_tables(ram)?;
    Ok(entry)
}

fn put(ram: &GuestRam, at: u64, bytes: &[u8]) -> Result<(), Error> {
    ram.memory().write_slice(bytes, GuestAddress(at)).map_err(|_| Error::Write(at))
}
