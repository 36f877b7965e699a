//! The start of the first vCPU: in 64-bit mode with memory mapped one to one (the Linux boot
//! protocol), or in 32-bit mode without paging (PVH). The others wait until the guest sends them a
//! start-up interrupt.

use super::{Error, layout, put};
use keiki_hv::{GuestRam, Result as HvResult, Vcpu};
use kvm_bindings::{kvm_lapic_state, kvm_regs, kvm_segment, kvm_sregs};

/// Model-specific registers that firmware would set: fast string instructions, and all memory
/// cacheable.
const MSRS: [(u32, u64); 2] = [(0x1a0, 1), (0x2ff, 1 << 11 | 6)];

const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const PAGE: u64 = 0x1000;
const PRESENT_WRITABLE: u64 = 3;
const LARGE: u64 = 1 << 7;
/// Page directories of 1 GiB each. The kernel maps the memory above 4 GiB.
const DIRECTORIES: u64 = 4;
/// Bit 1 of the flags is always set.
const FLAGS: u64 = 2;
const STACK: u64 = 0x8ff0;

/// Selectors of the Linux boot protocol.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit mode, boot parameters at [`layout::BOOT_PARAMS`].
    Linux64(u64),
    /// 32-bit mode, start information at [`layout::START_INFO`].
    Pvh(u64),
}

impl Entry {
    /// Sets up a vCPU. Memory types must be the same on all vCPUs; the rest is for the first one
    /// only.
    pub fn apply(self, vcpu: &Vcpu) -> HvResult<()> {
        vcpu.set_msrs(&MSRS)?;
        let mut lapic = vcpu.lapic()?;
        mask_old_interrupts(&mut lapic);
        vcpu.set_lapic(&lapic)?;
        if vcpu.id() != 0 {
            return Ok(());
        }
        let mut sregs = vcpu.sregs()?;
        self.special(&mut sregs);
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&self.general())
    }

    fn general(self) -> kvm_regs {
        let regs = kvm_regs { rflags: FLAGS, rsp: STACK, rbp: STACK, ..kvm_regs::default() };
        match self {
            Self::Linux64(rip) => kvm_regs { rip, rsi: layout::BOOT_PARAMS, ..regs },
            Self::Pvh(rip) => kvm_regs { rip, rbx: layout::START_INFO, ..regs },
        }
    }

    fn special(self, sregs: &mut kvm_sregs) {
        let long = matches!(self, Self::Linux64(_));
        sregs.cs = segment(CODE, code_flags(long));
        for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
            *data = segment(DATA, DATA_FLAGS);
        }
        sregs.tr = segment(TASK, TASK_FLAGS);
        sregs.gdt.base = layout::GDT;
        sregs.gdt.limit = DESCRIPTORS * 8 - 1;
        sregs.idt.base = 0;
        sregs.idt.limit = 0;
        sregs.cr0 |= CR0_PE;
        if long {
            sregs.cr3 = layout::PAGE_TABLES;
            sregs.cr4 |= CR4_PAE;
            sregs.cr0 |= CR0_PG;
            sregs.efer |= EFER_LME | EFER_LMA;
        } else {
            sregs.cr4 = 0;
        }
    }
}

/// A guest that sees no PICs never sets them up, but KVM has them. The line of the serial console
/// would reach the processor through them too, with a vector that means "overflow".
fn mask_old_interrupts(lapic: &mut kvm_lapic_state) {
    for (register, byte) in lapic.regs.iter_mut().skip(LVT0).zip(LVT_MASKED_EXTINT.to_le_bytes()) {
        *register = byte.cast_signed();
    }
}

/// Offset of the register for the line of the PICs.
const LVT0: usize = 0x350;
/// Masked, external interrupt mode.
const LVT_MASKED_EXTINT: u32 = 1 << 16 | 7 << 8;

/// Descriptors of [`put_tables`].
const DESCRIPTORS: u16 = 5;
/// Granularity, size, presence, privilege, type: bits 8 to 23 of a descriptor's upper half.
const DATA_FLAGS: u16 = 0xc093;
const TASK_FLAGS: u16 = 0x808b;

const fn code_flags(long: bool) -> u16 {
    if long { 0xa09b } else { 0xc09b }
}

/// Writes page tables and segment descriptors. 32-bit mode never reads them: its segments are set
/// directly.
pub(super) fn put_tables(ram: &GuestRam) -> Result<(), Error> {
    let gdt = [0, 0, descriptor(code_flags(true)), descriptor(DATA_FLAGS), descriptor(TASK_FLAGS)];
    put_words(ram, layout::GDT, gdt)?;
    let pointers = layout::PAGE_TABLES + PAGE;
    let directories = pointers + PAGE;
    put_words(ram, layout::PAGE_TABLES, [pointers | PRESENT_WRITABLE])?;
    put_words(ram, pointers, (0..DIRECTORIES).map(|gib| (directories + gib * PAGE) | PRESENT_WRITABLE))?;
    put_words(ram, directories, (0..DIRECTORIES * 512).map(|page| page << 21 | PRESENT_WRITABLE | LARGE))
}

fn put_words(ram: &GuestRam, at: u64, words: impl IntoIterator<Item = u64>) -> Result<(), Error> {
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    put(ram, at, &bytes)
}

/// A flat segment in the descriptor table.
const fn descriptor(flags: u16) -> u64 {
    0xf_0000_0000_ffff & !(0xf << 32) | (0xf << 48) | (flags as u64 & 0xf0ff) << 40
}

/// A flat segment in a register.
fn segment(selector: u16, flags: u16) -> kvm_segment {
    let bit = |at: u16| u8::from(flags & 1 << at != 0);
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: (flags & 0xf) as u8,
        s: bit(4),
        dpl: 0,
        present: bit(7),
        avl: bit(12),
        l: bit(13),
        db: bit(14),
        g: bit(15),
        ..kvm_segment::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keiki_hv::HugePages;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn the_first_four_gib_are_mapped_one_to_one() {
        let ram = GuestRam::anonymous(64 << 20, HugePages::No).unwrap();
        put_tables(&ram).unwrap();
        let word = |at: u64| ram.memory().read_obj::<u64>(GuestAddress(at)).unwrap();
        let next = |entry: u64| entry & !0xfff;
        for address in [0_u64, 0x1234_5678, 0xffe0_0000, (4 << 30) - 1] {
            let pointers = next(word(layout::PAGE_TABLES + (address >> 39 & 511) * 8));
            let directory = next(word(pointers + (address >> 30 & 511) * 8));
            let entry = word(directory + (address >> 21 & 511) * 8);
            assert_eq!(entry & 0x83, 0x83, "present, writable, large");
            assert_eq!(entry & !0x1f_ffff, address & !0x1f_ffff);
        }
    }

    #[test]
    fn the_old_interrupt_controllers_are_masked() {
        let mut lapic = kvm_lapic_state::default();
        mask_old_interrupts(&mut lapic);
        let bytes: Vec<u8> = lapic.regs[0x350..0x354].iter().map(|byte| byte.cast_unsigned()).collect();
        assert_eq!(bytes, [0, 7, 1, 0]);
        assert_eq!(lapic.regs.iter().filter(|byte| **byte != 0).count(), 2);
    }

    #[test]
    fn descriptors_are_flat_segments() {
        assert_eq!(descriptor(0xa09b), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(0xc093), 0x00cf_9300_0000_ffff);
    }

    #[test]
    fn the_kernel_gets_what_its_protocol_says() {
        let mut sregs = kvm_sregs::default();
        let linux = Entry::Linux64(0x10_0200);
        linux.special(&mut sregs);
        assert_eq!((sregs.cs.l, sregs.cs.db, sregs.cs.selector), (1, 0, CODE));
        assert_eq!(sregs.efer, EFER_LME | EFER_LMA);
        assert_eq!((linux.general().rip, linux.general().rsi), (0x10_0200, layout::BOOT_PARAMS));
        let mut sregs = kvm_sregs::default();
        let pvh = Entry::Pvh(0x100_0000);
        pvh.special(&mut sregs);
        assert_eq!((sregs.cs.l, sregs.cs.db, sregs.cr0, sregs.efer), (0, 1, CR0_PE, 0));
        assert_eq!(pvh.general().rbx, layout::START_INFO);
    }
}
