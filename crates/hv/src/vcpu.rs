//! One vCPU: its exits and its state.
//!
//! **Parked** means more than stopped. When `KVM_RUN` returns for a device access, the access is
//! half done: the next `KVM_RUN` finishes it. A state saved in between would repeat the access in
//! every copy. So [`Vcpu::complete_exit`] enters once more with `immediate_exit` set, which
//! finishes the access and runs no instruction.
#![allow(unsafe_code)]

use crate::{
    Error, Result,
    cpuid::CpuModel,
    state::{VCPU_STATE, VcpuState, check_version},
};
use kvm_bindings::{
    KVM_EXIT_IO, KVM_EXIT_IO_IN, KVM_MAX_MSR_ENTRIES, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN,
    Msrs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_pre_fault_memory, kvm_regs, kvm_sregs,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use std::{io, os::fd::AsRawFd, sync::atomic::AtomicU8};

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// A part of a state, and how to restore it.
type Part = (&'static str, fn(&Vcpu, &VcpuState) -> Result<()>);

/// The order in which a state is restored, after CPUID:
///
/// - the rate of the counter before the counter, and the counter before other registers, whose
///   deadlines depend on it
/// - the special registers before the APIC: they give its address and its mode
/// - the enabled extended states before the states themselves
/// - the deadline after the APIC: it is lost unless the timer of the APIC is in deadline mode
/// - events late, because earlier steps may change them; running or halted last
const ORDER: [Part; 12] = [
    ("tsc rate", |vcpu, state| vcpu.set_tsc_khz(state.tsc_khz)),
    ("special registers", |vcpu, state| vcpu.set_sregs(&state.sregs)),
    ("registers", |vcpu, state| vcpu.set_regs(&state.regs)),
    ("tsc", |vcpu, state| vcpu.put_msrs(state, |index| index == MSR_TSC)),
    ("msrs", |vcpu, state| vcpu.put_msrs(state, |index| ![MSR_TSC, MSR_TSC_DEADLINE].contains(&index))),
    ("xcrs", |vcpu, state| vcpu.fd.set_xcrs(&state.xcrs).map_err(Error::errno("KVM_SET_XCRS"))),
    ("xsave", Vcpu::put_xsave),
    ("debug registers", |vcpu, state| {
        vcpu.fd.set_debug_regs(&state.debug).map_err(Error::errno("KVM_SET_DEBUGREGS"))
    }),
    ("apic", |vcpu, state| vcpu.set_lapic(&state.lapic)),
    ("deadline", |vcpu, state| vcpu.put_msrs(state, |index| index == MSR_TSC_DEADLINE)),
    ("events", |vcpu, state| {
        vcpu.fd.set_vcpu_events(&state.events).map_err(Error::errno("KVM_SET_VCPU_EVENTS"))
    }),
    ("mp state", |vcpu, state| vcpu.set_mp_state(state.mp_state)),
];

/// Serves accesses of the guest to ports and to addresses outside RAM. Called on vCPU threads.
pub trait Bus: Send + Sync {
    /// Fills `data`, one to four bytes.
    fn port_read(&self, port: u16, data: &mut [u8]);
    fn port_write(&self, port: u16, data: &[u8]);
    /// Fills `data`, one to eight bytes.
    fn read(&self, address: u64, data: &mut [u8]);
    fn write(&self, address: u64, data: &[u8]);
}

/// Why a vCPU cannot continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Triple fault. Many guests reboot this way.
    Shutdown,
    PowerOff,
    Reset,
    /// KVM or the processor refused to run it.
    Failed(String),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shutdown => f.write_str("triple fault"),
            Self::PowerOff => f.write_str("power off"),
            Self::Reset => f.write_str("reset"),
            Self::Failed(why) => write!(f, "vCPU error: {why}"),
        }
    }
}

/// How one entry into the guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// The bus served a device access.
    Served,
    /// A signal, or `immediate_exit`.
    Interrupted,
    /// The vCPU cannot continue.
    End(End),
}

/// A vCPU. Its holder may enter the guest.
#[derive(Debug)]
pub struct Vcpu {
    fd: VcpuFd,
    id: u8,
    msrs: Vec<u32>,
}

impl Vcpu {
    pub(crate) fn new(
        mut fd: VcpuFd,
        id: u8,
        model: &CpuModel,
        msrs: &[u32],
        run_size: usize,
    ) -> Result<Self> {
        let run: *mut kvm_bindings::kvm_run = fd.get_kvm_run();
        // In a copy of the process this mapping would keep the whole virtual machine alive. SAFETY:
        // the range is the mapping that `fd` owns; the advice changes what fork does, nothing here.
        if unsafe { libc::madvise(run.cast(), run_size, libc::MADV_DONTFORK) } != 0 {
            return Err(Error::Call("madvise", io::Error::last_os_error()));
        }
        fd.set_cpuid2(&model.for_vcpu(id)?).map_err(Error::errno("KVM_SET_CPUID2"))?;
        Ok(Self { fd, id, msrs: msrs.to_vec() })
    }

    #[must_use]
    pub fn id(&self) -> u8 {
        self.id
    }

    /// The flag that makes `KVM_RUN` return at once. It lives as long as the vCPU.
    pub(crate) fn immediate_exit(&mut self) -> *const AtomicU8 {
        (&raw mut self.fd.get_kvm_run().immediate_exit).cast_const().cast()
    }

    /// Enters the guest until it exits, and serves the exit from `bus`.
    pub fn run(&mut self, bus: &dyn Bus) -> Exit {
        match self.fd.run() {
            Ok(VcpuExit::IoIn(..) | VcpuExit::IoOut(..)) => self.port_access(bus),
            Ok(VcpuExit::MmioRead(address, data)) => {
                bus.read(address, data);
                Exit::Served
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                bus.write(address, data);
                Exit::Served
            }
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::SetTpr) => Exit::Interrupted,
            Ok(VcpuExit::Shutdown) => Exit::End(End::Shutdown),
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _)) => Exit::End(End::PowerOff),
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _)) => Exit::End(End::Reset),
            Ok(VcpuExit::FailEntry(reason, _)) => {
                Exit::End(End::Failed(format!("the processor refuses to enter the guest: {reason:#x}")))
            }
            Ok(VcpuExit::InternalError) => Exit::End(End::Failed(self.internal_error())),
            Ok(exit) => Exit::End(End::Failed(format!("unexpected exit {exit:?}"))),
            Err(error) => match error.errno() {
                libc::EINTR | libc::EAGAIN => Exit::Interrupted,
                _ => Exit::End(End::Failed(format!("KVM_RUN: {error}"))),
            },
        }
    }

    /// Serves one element after the other: a string instruction moves many with one exit.
    fn port_access(&mut self, bus: &dyn Bus) -> Exit {
        let run = self.fd.get_kvm_run();
        debug_assert_eq!(run.exit_reason, KVM_EXIT_IO);
        // SAFETY: the exit is about a port, for which the kernel fills this member.
        let io = unsafe { run.__bindgen_anon_1.io };
        let (size, count) = (usize::from(io.size).clamp(1, 4), io.count as usize);
        let base: *mut u8 = std::ptr::from_mut(run).cast();
        // SAFETY: the kernel put `count` elements of `size` bytes at this offset of the mapping
        // that `run` begins, and nothing else uses it while `self` is borrowed.
        let data = unsafe { std::slice::from_raw_parts_mut(base.add(io.data_offset as usize), size * count) };
        for element in data.chunks_exact_mut(size) {
            if u32::from(io.direction) == KVM_EXIT_IO_IN {
                bus.port_read(io.port, element);
            } else {
                bus.port_write(io.port, element);
            }
        }
        Exit::Served
    }

    fn internal_error(&mut self) -> String {
        let rip = self.fd.get_regs().map(|regs| regs.rip).unwrap_or_default();
        let run = self.fd.get_kvm_run();
        // SAFETY: the exit is an internal error, for which the kernel fills this member.
        let suberror = unsafe { run.__bindgen_anon_1.internal.suberror };
        format!("KVM internal error {suberror} at {rip:#x}")
    }

    /// Maps these addresses of RAM into the guest for reading, without the exit that each page
    /// costs otherwise. No effect before Linux 6.11.
    ///
    /// # Errors
    /// On error the pages before it stay mapped.
    pub fn prefault(&self, address: u64, len: u64) -> Result<()> {
        /// `_IOWR(KVMIO, 0xd5, struct kvm_pre_fault_memory)`.
        const KVM_PRE_FAULT_MEMORY: libc::Ioctl = 0xc040_aed5;
        let mut range = kvm_pre_fault_memory { gpa: address, size: len, ..kvm_pre_fault_memory::default() };
        // The call may stop early. It leaves the rest in `range`.
        while range.size > 0 {
            // SAFETY: the descriptor is a vCPU's, and the request takes this structure.
            if unsafe { libc::ioctl(self.fd.as_raw_fd(), KVM_PRE_FAULT_MEMORY, &raw mut range) } == 0 {
                continue;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                Some(libc::ENOTTY | libc::EOPNOTSUPP | libc::EINVAL) => return Ok(()),
                _ => return Err(Error::Call("KVM_PRE_FAULT_MEMORY", error)),
            }
        }
        Ok(())
    }

    /// Finishes a device access that is half done, without running the guest.
    pub fn complete_exit(&mut self, bus: &dyn Bus) -> Result<(), End> {
        self.fd.set_kvm_immediate_exit(1);
        // A string instruction or a wide access may need several rounds.
        let exit = loop {
            match self.run(bus) {
                Exit::Served => {}
                exit => break exit,
            }
        };
        self.fd.set_kvm_immediate_exit(0);
        match exit {
            Exit::End(end) => Err(end),
            _ => Ok(()),
        }
    }

    /// General registers.
    pub fn regs(&self) -> Result<kvm_regs> {
        self.fd.get_regs().map_err(Error::errno("KVM_GET_REGS"))
    }

    /// Sets general registers.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        self.fd.set_regs(regs).map_err(Error::errno("KVM_SET_REGS"))
    }

    /// Segments and control registers.
    pub fn sregs(&self) -> Result<kvm_sregs> {
        self.fd.get_sregs().map_err(Error::errno("KVM_GET_SREGS"))
    }

    /// Sets segments and control registers.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        self.fd.set_sregs(sregs).map_err(Error::errno("KVM_SET_SREGS"))
    }

    /// Local APIC.
    pub fn lapic(&self) -> Result<kvm_lapic_state> {
        self.fd.get_lapic().map_err(Error::errno("KVM_GET_LAPIC"))
    }

    /// Sets the local APIC.
    pub fn set_lapic(&self, lapic: &kvm_lapic_state) -> Result<()> {
        self.fd.set_lapic(lapic).map_err(Error::errno("KVM_SET_LAPIC"))
    }

    /// Sets model-specific registers, in order.
    ///
    /// # Errors
    /// Names the register that KVM refuses.
    pub fn set_msrs(&self, msrs: &[(u32, u64)]) -> Result<()> {
        for chunk in msrs.chunks(KVM_MAX_MSR_ENTRIES) {
            let entries: Vec<_> = chunk
                .iter()
                .map(|(index, data)| kvm_msr_entry { index: *index, data: *data, reserved: 0 })
                .collect();
            let entries = Msrs::from_entries(&entries)
                .map_err(|error| Error::State(format!("model-specific registers: {error:?}")))?;
            let set = self.fd.set_msrs(&entries).map_err(Error::errno("KVM_SET_MSRS"))?;
            if let Some((index, _)) = chunk.get(set) {
                return Err(Error::Msr(*index));
            }
        }
        Ok(())
    }

    /// Reads the model-specific registers. The kernel stops at the first that it cannot read:
    /// continue after it.
    fn msrs(&self) -> Result<Vec<(u32, u64)>> {
        let mut found = Vec::with_capacity(self.msrs.len());
        let mut rest = self.msrs.as_slice();
        while !rest.is_empty() {
            let wanted = rest.len().min(KVM_MAX_MSR_ENTRIES);
            let entries: Vec<_> = rest
                .iter()
                .take(wanted)
                .map(|index| kvm_msr_entry { index: *index, ..kvm_msr_entry::default() })
                .collect();
            let mut entries = Msrs::from_entries(&entries)
                .map_err(|error| Error::State(format!("model-specific registers: {error:?}")))?;
            let got = self.fd.get_msrs(&mut entries).map_err(Error::errno("KVM_GET_MSRS"))?;
            found.extend(entries.as_slice().iter().take(got).map(|entry| (entry.index, entry.data)));
            rest = rest.get((got + usize::from(got < wanted))..).unwrap_or_default();
        }
        Ok(found)
    }

    /// Its state. Call it only after [`Vcpu::complete_exit`].
    pub fn save(&self) -> Result<VcpuState> {
        // First the MP state: reading it makes KVM process pending INIT and SIPI. Last the events.
        let mp_state = self.fd.get_mp_state().map_err(Error::errno("KVM_GET_MP_STATE"))?;
        Ok(VcpuState {
            version: VCPU_STATE,
            id: self.id,
            tsc_khz: self.fd.get_tsc_khz().unwrap_or(0),
            regs: self.regs()?,
            sregs: self.sregs()?,
            msrs: self.msrs()?,
            xcrs: self.fd.get_xcrs().map_err(Error::errno("KVM_GET_XCRS"))?,
            xsave: self.fd.get_xsave().map_err(Error::errno("KVM_GET_XSAVE"))?,
            debug: self.fd.get_debug_regs().map_err(Error::errno("KVM_GET_DEBUGREGS"))?,
            lapic: self.lapic()?,
            events: self.fd.get_vcpu_events().map_err(Error::errno("KVM_GET_VCPU_EVENTS"))?,
            mp_state,
        })
    }

    /// Restores a state, in the order of `ORDER`.
    pub fn restore(&self, state: &VcpuState) -> Result<()> {
        check_version("vCPU", state.version, VCPU_STATE)?;
        if state.id != self.id {
            return Err(Error::State(format!("the saved vCPU is number {}, not {}", state.id, self.id)));
        }
        ORDER.iter().try_for_each(|(_, put)| put(self, state))
    }

    fn put_msrs(&self, state: &VcpuState, which: impl Fn(u32) -> bool) -> Result<()> {
        let wanted: Vec<_> = state.msrs.iter().filter(|(index, _)| which(*index)).copied().collect();
        self.set_msrs(&wanted)
    }

    fn put_xsave(&self, state: &VcpuState) -> Result<()> {
        // SAFETY: no feature whose state is larger than this structure is ever enabled: they need a
        // permission (ARCH_REQ_XCOMP_GUEST_PERM) that this process does not ask for.
        unsafe { self.fd.set_xsave(&state.xsave) }.map_err(Error::errno("KVM_SET_XSAVE"))
    }

    /// Running, halted, waiting for its start.
    pub fn set_mp_state(&self, state: kvm_mp_state) -> Result<()> {
        self.fd.set_mp_state(state).map_err(Error::errno("KVM_SET_MP_STATE"))
    }

    /// Tells a guest that uses kvmclock that it was paused.
    pub fn notify_pause(&self) -> Result<()> {
        match self.fd.kvmclock_ctrl() {
            // The guest does not use kvmclock.
            Err(error) if error.errno() == libc::EINVAL => Ok(()),
            other => other.map_err(Error::errno("KVM_KVMCLOCK_CTRL")),
        }
    }

    /// Scales the time stamp counter to the rate that the guest measured when it booted.
    fn set_tsc_khz(&self, khz: u32) -> Result<()> {
        let here = self.fd.get_tsc_khz().unwrap_or(0);
        // Within 250 parts per million it is the same clock, measured twice.
        if khz == 0 || here == 0 || u64::from(khz.abs_diff(here)) * 4000 <= u64::from(here) {
            return Ok(());
        }
        self.fd.set_tsc_khz(khz).map_err(Error::errno("KVM_SET_TSC_KHZ"))
    }
}

#[cfg(test)]
mod tests {
    use super::ORDER;

    /// `tests/state.rs` shows what is lost otherwise, where this KVM loses it.
    #[test]
    fn a_state_is_put_in_in_an_order_that_loses_nothing() {
        let at = |wanted: &str| ORDER.iter().position(|(name, _)| *name == wanted).expect(wanted);
        let before = [
            ("tsc rate", "tsc"),
            ("tsc", "msrs"),
            ("tsc", "deadline"),
            ("special registers", "apic"),
            ("xcrs", "xsave"),
            ("msrs", "apic"),
            ("apic", "deadline"),
            ("deadline", "events"),
            ("events", "mp state"),
        ];
        for (first, then) in before {
            assert!(at(first) < at(then), "{first} belongs before {then}");
        }
        assert_eq!(at("mp state"), ORDER.len() - 1);
    }
}
