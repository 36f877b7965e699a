//! The state of a machine as plain data. What is read back from a file is not trusted.
//!
//! Each part has a version. The structures inside are those of the kernel, whose layout never
//! changes. A new kind of state is a new field and a higher version.

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
    /// Number of the vCPU and of its APIC.
    pub id: u8,
    /// kHz of the time stamp counter. 0 if the host does not tell.
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
    /// Running, halted, or waiting for its start.
    pub mp_state: kvm_mp_state,
}

/// A machine without its vCPUs and its memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmState {
    pub version: u32,
    pub pic_master: kvm_irqchip,
    pub pic_slave: kvm_irqchip,
    pub ioapic: kvm_irqchip,
    /// kvmclock: nanoseconds since the machine was made.
    pub clock: kvm_clock_data,
}

pub(crate) fn check_version(part: &str, found: u32, known: u32) -> Result<()> {
    if found == known {
        return Ok(());
    }
    Err(Error::State(format!("the saved {part} has version {found}, this monitor reads version {known}")))
}
