//! `/dev/kvm` and virtual machines.
#![allow(unsafe_code)]

use crate::{
    Error, GuestRam, Result,
    state::{VM_STATE, VmState, check_version},
    vcpu::Vcpu,
};
use kvm_bindings::{
    CpuId, KVM_CAP_PRE_FAULT_MEMORY, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_MAX_CPUID_ENTRIES, kvm_clock_data, kvm_irqchip, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, VmFd};
use std::{
    mem::ManuallyDrop,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd},
    sync::Arc,
};
use vmm_sys_util::eventfd::EventFd;

/// Pages that KVM needs below 4 GiB on some processors: one, then three. The memory map reserves
/// them.
const IDENTITY_MAP: u64 = 0xfffb_c000;
const TSS: usize = 0xfffb_d000;

/// Bits of CPUID leaf 1, ECX.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;

/// Capabilities that every machine needs.
const NEEDED: [(Cap, &str); 6] = [
    (Cap::Irqchip, "interrupt controller"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "immediate exit"),
    (Cap::ExtCpuid, "CPUID"),
    (Cap::VcpuEvents, "vCPU events"),
    (Cap::AdjustClock, "adjustable clock"),
];

/// An open `/dev/kvm`.
#[derive(Debug)]
pub struct Kvm {
    inner: kvm_ioctls::Kvm,
}

impl Kvm {
    /// Takes a descriptor of `/dev/kvm`.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        // SAFETY: we own the descriptor and pass it on. The next call checks that it is KVM's.
        let inner = unsafe { kvm_ioctls::Kvm::from_raw_fd(fd.into_raw_fd()) };
        if inner.get_api_version() != 12 {
            return Err(Error::Missing("API of version 12"));
        }
        for (cap, name) in NEEDED {
            if !inner.check_extension(cap) {
                return Err(Error::Missing(name));
            }
        }
        Ok(Self { inner })
    }

    /// Opens `/dev/kvm`, for tests and probes. A monitor receives a descriptor.
    pub fn open() -> Result<Self> {
        let file = std::fs::File::options().read(true).write(true).open("/dev/kvm");
        Self::new(file.map_err(Error::io("opening /dev/kvm"))?.into())
    }

    /// Whether KVM can map pages before the guest touches them: [`crate::Vcpu::prefault`].
    #[must_use]
    pub fn prefaults(&self) -> bool {
        self.inner.check_extension_raw(KVM_CAP_PRE_FAULT_MEMORY.into()) > 0
    }

    /// All features that this host could show a guest.
    pub fn supported_cpuid(&self) -> Result<CpuId> {
        let mut cpuid = self
            .inner
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(Error::errno("KVM_GET_SUPPORTED_CPUID"))?;
        // Before Linux 6.14 KVM does not list these features, which it emulates itself. A guest
        // without them does not know that it is a guest: it has no kvmclock, and calibrates its
        // timers against hardware that does not exist.
        let mut own = HYPERVISOR;
        if self.inner.check_extension(Cap::TscDeadlineTimer) {
            own |= TSC_DEADLINE;
        }
        for entry in cpuid.as_mut_slice().iter_mut().filter(|entry| entry.function == 1) {
            entry.ecx |= own;
        }
        Ok(cpuid)
    }

    /// Makes a virtual machine over this memory, without vCPUs.
    pub fn create_vm(&self, ram: &GuestRam) -> Result<Vm> {
        let fd = self.inner.create_vm().map_err(Error::errno("KVM_CREATE_VM"))?;
        fd.set_identity_map_address(IDENTITY_MAP).map_err(Error::errno("KVM_SET_IDENTITY_MAP_ADDR"))?;
        fd.set_tss_address(TSS).map_err(Error::errno("KVM_SET_TSS_ADDR"))?;
        fd.create_irq_chip().map_err(Error::errno("KVM_CREATE_IRQCHIP"))?;
        for (slot, span) in (0..).zip(ram.spans()) {
            let region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: span.guest,
                memory_size: span.len,
                userspace_addr: span.host,
            };
            // SAFETY: the span is mapped, and `Vm` keeps its memory.
            unsafe { fd.set_user_memory_region(region) }
                .map_err(Error::errno("KVM_SET_USER_MEMORY_REGION"))?;
        }
        let msrs = self.inner.get_msr_index_list().map_err(Error::errno("KVM_GET_MSR_INDEX_LIST"))?;
        let run_size = self.inner.get_vcpu_mmap_size().map_err(Error::errno("KVM_GET_VCPU_MMAP_SIZE"))?;
        Ok(Vm { fd: Arc::new(fd), ram: ram.clone(), msrs: msrs.as_slice().to_vec(), run_size })
    }
}

impl std::os::fd::AsFd for Kvm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor stays open while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.inner.as_raw_fd()) }
    }
}

/// A virtual machine: memory and interrupt controllers. It has no PIT: hardware-reduced ACPI needs
/// none, the clocks are kvmclock and that of the APIC, and KVM takes milliseconds to make a PIT.
#[derive(Debug, Clone)]
pub struct Vm {
    fd: Arc<VmFd>,
    ram: GuestRam,
    msrs: Vec<u32>,
    run_size: usize,
}

impl Vm {
    #[must_use]
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Adds a vCPU. `cpuid` is what it shows, before the number is put in (see [`crate::cpuid`]).
    pub fn create_vcpu(&self, id: u8, cpuid: &crate::cpuid::CpuModel) -> Result<Vcpu> {
        let fd = self.fd.create_vcpu(id.into()).map_err(Error::errno("KVM_CREATE_VCPU"))?;
        Vcpu::new(fd, id, cpuid, &self.msrs, self.run_size)
    }

    /// Raises an edge-triggered interrupt: the line goes up and down. Done when this returns; an
    /// irqfd would still be at work in a kernel thread when a freeze takes the state of the
    /// interrupt controller.
    pub fn pulse(&self, gsi: u32) -> Result<()> {
        self.set_line(gsi, true)?;
        self.set_line(gsi, false)
    }

    /// Sets the line of a level-triggered interrupt.
    pub fn set_line(&self, gsi: u32, up: bool) -> Result<()> {
        self.fd.set_irq_line(gsi, up).map_err(Error::errno("KVM_IRQ_LINE"))
    }

    /// Has the event counter `event` signalled whenever the guest writes the four bytes of `value`
    /// to `address`, instead of an exit.
    pub fn notify(&self, event: BorrowedFd<'_>, address: u64, value: u32) -> Result<()> {
        // SAFETY: the descriptor is open while it is borrowed, and what is made of it here is never
        // dropped.
        let event = ManuallyDrop::new(unsafe { EventFd::from_raw_fd(event.as_raw_fd()) });
        self.fd
            .register_ioevent(&event, &IoEventAddress::Mmio(address), value)
            .map_err(Error::errno("KVM_IOEVENTFD"))
    }

    /// The state of the machine besides memory and vCPUs.
    pub fn save(&self) -> Result<VmState> {
        let chip = |chip_id| -> Result<kvm_irqchip> {
            let mut chip = kvm_irqchip { chip_id, ..kvm_irqchip::default() };
            self.fd.get_irqchip(&mut chip).map_err(Error::errno("KVM_GET_IRQCHIP"))?;
            Ok(chip)
        };
        Ok(VmState {
            version: VM_STATE,
            pic_master: chip(KVM_IRQCHIP_PIC_MASTER)?,
            pic_slave: chip(KVM_IRQCHIP_PIC_SLAVE)?,
            ioapic: chip(KVM_IRQCHIP_IOAPIC)?,
            clock: self.fd.get_clock().map_err(Error::errno("KVM_GET_CLOCK"))?,
        })
    }

    /// Restores the interrupt controllers. The vCPUs come first: a pending interrupt goes to a
    /// local APIC at once, and a later restore of that APIC would lose it. [`Vm::set_clock`] comes
    /// last.
    pub fn restore(&self, state: &VmState) -> Result<()> {
        check_version("machine", state.version, VM_STATE)?;
        let chips = [
            (&state.pic_master, KVM_IRQCHIP_PIC_MASTER, "first PIC"),
            (&state.pic_slave, KVM_IRQCHIP_PIC_SLAVE, "second PIC"),
            (&state.ioapic, KVM_IRQCHIP_IOAPIC, "I/O APIC"),
        ];
        for (chip, id, name) in chips {
            if chip.chip_id != id {
                let text = format!("the saved {name} claims to be interrupt controller {}", chip.chip_id);
                return Err(Error::State(text));
            }
            self.fd.set_irqchip(chip).map_err(Error::errno("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }

    /// Continues the clock of the guest from where it stood: no time passes for a guest while it is
    /// frozen, be it a second or a week. The agent sets the wall clock when the copy is released.
    pub fn set_clock(&self, state: &VmState) -> Result<()> {
        let clock = kvm_clock_data {
            clock: state.clock.clock,
            // No KVM_CLOCK_REALTIME: that would add the time that passed.
            flags: 0,
            ..kvm_clock_data::default()
        };
        self.fd.set_clock(&clock).map_err(Error::errno("KVM_SET_CLOCK"))
    }
}
