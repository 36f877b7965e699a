//! The state of a machine as plain data: what is written to a file and read back with distrust.
//!
//! Each part says its version. The structures inside are the kernel's, whose layout never changes; a new kind of
//! state is a new field and a higher version.

use crate::{Error, Result};
use kvm_bindings::{
    kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use serde::{Deserialize, Serialize};

pub const VCPU_STATE: u32 = 1;
pub const VM_STATE: u32 = 1;

/// One vCPU, parked.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    pub version: u32,
    /// Its number, which is its APIC's.
    pub id: u8,
    /// kHz of its time stamp counter; 0 if the host does not say.
    pub tsc_khz: u32,
    pub regs: kvm_regs,
    /// Segments, control registers, APIC base.
    pub sregs: kvm_sregs,
    /// Model-specific registers: index and value.
    pub msrs: Vec<(u32, u64)>,
    /// Which extended states are enabled.
    pub xcrs: kvm_xcrs,
    /// FPU, SSE, AVX and their like.
    pub xsave: kvm_xsave,
    pub debug: kvm_debugregs,
    pub lapic: kvm_lapic_state,
    /// Pending exceptions, interrupts, NMIs.
    pub events: kvm_vcpu_events,
    /// Running, halted, waiting for its start.
    pub mp_state: kvm_mp_state,
}

/// A machine without its vCPUs and its memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmState {
    pub version: u32,
    pub pic_master: kvm_irqchip,
    /// The second of the old ones.
    pub pic_slave: kvm_irqchip,
    /// The new one.
    pub ioapic: kvm_irqchip,
    /// Nanoseconds since the machine was made, as its clock (kvmclock) shows them.
    pub clock: kvm_clock_data,
}

pub(crate) fn check_version(part: &str, found: u32, known: u32) -> Result<()> {
    if found == known {
        return Ok(());
    }
    Err(Error::State(format!("the saved {part} has version {found}, this monitor reads version {known}")))
}
