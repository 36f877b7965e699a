//! A guest of a few bytes without firmware or kernel: 32-bit code that counts in memory and
//! accesses devices in every possible way, over and over.
#![allow(dead_code)]

use keiki_hv::{
    Bus, GuestRam, HugePages, Kvm, Vcpu, Vm,
    cpuid::{Baseline, CpuModel},
    fork::{Side, exit, fork},
    state::{VcpuState, VmState},
};
use std::{
    io::{Read, Write},
    os::fd::{AsFd, BorrowedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Mutex,
};
use vm_memory::{Bytes, GuestAddress};

pub const CODE: u64 = 0x1000;
/// Where the guest counts its rounds.
pub const COUNT: u64 = 0x2000;
/// Where it stores what it has read: `IN`, memory-mapped, `INS` (three).
pub const READ: u64 = 0x2004;

/// One round: count, `OUT`, `IN`, write and read a device by address, `OUTS` and `INS` of three
/// each, again.
#[rustfmt::skip]
pub const EVERY_EXIT: &[u8] = &[
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00, // inc dword [COUNT]
    0xa1, 0x00, 0x20, 0x00, 0x00,       // mov eax, [COUNT]
    0xe7, 0x10,                         // out 0x10, eax
    0xe5, 0x50,                         // in eax, 0x50
    0xa3, 0x04, 0x20, 0x00, 0x00,       // mov [READ], eax
    0xa3, 0x00, 0x00, 0x00, 0xd0,       // mov [0xd0000000], eax
    0xa1, 0x08, 0x00, 0x00, 0xd0,       // mov eax, [0xd0000008]
    0xa3, 0x08, 0x20, 0x00, 0x00,       // mov [READ + 4], eax
    0xfc,                               // cld
    0xbe, 0x00, 0x20, 0x00, 0x00,       // mov esi, COUNT
    0xb9, 0x03, 0x00, 0x00, 0x00,       // mov ecx, 3
    0xba, 0x30, 0x00, 0x00, 0x00,       // mov edx, 0x30
    0xf3, 0x6f,                         // rep outsd
    0xbf, 0x0c, 0x20, 0x00, 0x00,       // mov edi, READ + 8
    0xb9, 0x03, 0x00, 0x00, 0x00,       // mov ecx, 3
    0xba, 0x58, 0x00, 0x00, 0x00,       // mov edx, 0x58
    0xf3, 0x6d,                         // rep insd
    0xeb, 0xb8,                         // jmp the beginning
];

/// Counts and writes the count to port 0x10, over and over.
#[rustfmt::skip]
pub const COUNTER: &[u8] = &[
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00, // inc dword [COUNT]
    0xa1, 0x00, 0x20, 0x00, 0x00,       // mov eax, [COUNT]
    0xe7, 0x10,                         // out 0x10, eax
    0xeb, 0xf1,                         // jmp the beginning
];

/// None without KVM, with a note.
pub fn kvm() -> Option<Kvm> {
    match Kvm::open() {
        Ok(kvm) => Some(kvm),
        Err(error) => {
            keiki_testing::skip("kvm", format!("no KVM here: {error}"));
            None
        }
    }
}

/// The device accesses of the guest with their values.
#[derive(Debug, Default)]
pub struct Log {
    pub accesses: Mutex<Vec<(u8, u32)>>,
    /// Answers count from here.
    pub next: Mutex<u32>,
}

impl Log {
    pub fn note(&self, what: u8, data: &[u8]) {
        let value = u32::from_le_bytes(data.try_into().expect("four bytes"));
        self.accesses.lock().unwrap().push((what, value));
    }

    fn answer(&self, what: u8, data: &mut [u8]) {
        let mut next = self.next.lock().unwrap();
        *next += 1;
        data.copy_from_slice(&(1000 + *next).to_le_bytes());
        drop(next);
        self.note(what, data);
    }

    pub fn take(&self) -> Vec<(u8, u32)> {
        std::mem::take(&mut self.accesses.lock().unwrap())
    }

    pub fn len(&self) -> usize {
        self.accesses.lock().unwrap().len()
    }
}

impl Bus for Log {
    fn port_read(&self, port: u16, data: &mut [u8]) {
        self.answer(port as u8, data);
    }
    fn port_write(&self, port: u16, data: &[u8]) {
        self.note(port as u8, data);
    }
    fn read(&self, address: u64, data: &mut [u8]) {
        assert_eq!(address, 0xd000_0008);
        self.answer(0xd8, data);
    }
    fn write(&self, address: u64, data: &[u8]) {
        assert_eq!(address, 0xd000_0000);
        self.note(0xd0, data);
    }
}

pub fn ram(mib: u64) -> GuestRam {
    GuestRam::anonymous(mib << 20, HugePages::No).unwrap()
}

/// A machine that is about to run `code` on every vCPU.
pub fn machine(kvm: &Kvm, ram: &GuestRam, code: &[u8], vcpus: u8) -> (Vm, Vec<Vcpu>, CpuModel) {
    ram.memory().write_slice(code, GuestAddress(CODE)).unwrap();
    let vm = kvm.create_vm(ram).unwrap();
    let model = CpuModel::new(&kvm.supported_cpuid().unwrap(), Baseline::Baseline, vcpus);
    let cpus: Vec<_> = (0..vcpus).map(|id| vm.create_vcpu(id, &model).unwrap()).collect();
    for vcpu in &cpus {
        enter_flat(vcpu, CODE);
        // Otherwise these would wait for the first vCPU to start them.
        vcpu.set_mp_state(Default::default()).unwrap();
    }
    (vm, cpus, model)
}

/// 32-bit protected mode, every segment is all of memory.
pub fn enter_flat(vcpu: &Vcpu, at: u64) {
    let mut sregs = vcpu.sregs().unwrap();
    sregs.cr0 |= 1;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        (segment.base, segment.limit, segment.selector) = (0, 0xffff_ffff, 0x10);
        (segment.present, segment.s, segment.g, segment.db, segment.dpl) = (1, 1, 1, 1, 0);
        segment.type_ = 3;
    }
    (sregs.cs.selector, sregs.cs.type_) = (0x8, 11);
    vcpu.set_sregs(&sregs).unwrap();
    let mut regs = vcpu.regs().unwrap();
    (regs.rip, regs.rflags, regs.rsp) = (at, 2, 0x8000);
    vcpu.set_regs(&regs).unwrap();
}

/// The state besides memory, serialized as in a file.
pub fn save(vm: &Vm, vcpus: &[Vcpu]) -> Vec<u8> {
    let states: Vec<_> = vcpus.iter().map(|vcpu| vcpu.save().unwrap()).collect();
    postcard::to_stdvec(&(vm.save().unwrap(), states)).unwrap()
}

/// A new machine over this memory, in this state.
pub fn restore(kvm: &Kvm, ram: &GuestRam, model: &CpuModel, state: &[u8]) -> (Vm, Vec<Vcpu>) {
    let (vm_state, states): (VmState, Vec<VcpuState>) = postcard::from_bytes(state).unwrap();
    let vm = kvm.create_vm(ram).unwrap();
    let vcpus: Vec<_> = states.iter().map(|state| vm.create_vcpu(state.id, model).unwrap()).collect();
    for (vcpu, state) in vcpus.iter().zip(&states) {
        vcpu.restore(state).unwrap();
    }
    vm.restore(&vm_state).unwrap();
    vm.set_clock(&vm_state).unwrap();
    (vm, vcpus)
}

pub fn read_u32(ram: &GuestRam, at: u64) -> u32 {
    ram.memory().read_obj(GuestAddress(at)).unwrap()
}

/// Forks; the copy does `what` and sends back the bytes. None if it failed.
pub fn in_child(keep: &[BorrowedFd<'_>], what: impl FnOnce() -> Vec<u8>) -> Option<Vec<u8>> {
    let (pid, answer) = begin_child(keep, what);
    let _ = rustix::process::waitpid(
        rustix::process::Pid::from_raw(pid as i32),
        rustix::process::WaitOptions::empty(),
    );
    answer
}

/// Like [`in_child`], but the caller waits for the copy.
pub fn begin_child(keep: &[BorrowedFd<'_>], what: impl FnOnce() -> Vec<u8>) -> (u32, Option<Vec<u8>>) {
    let (mut from, mut to) = std::io::pipe().unwrap();
    let keep: Vec<_> = keep.iter().copied().chain([to.as_fd()]).collect();
    match fork(&keep).unwrap() {
        Side::Child => {
            let done = catch_unwind(AssertUnwindSafe(|| {
                let bytes = what();
                to.write_all(&bytes).unwrap();
                to.write_all(b"done").unwrap();
            }));
            exit(i32::from(done.is_err()))
        }
        Side::Parent { child } => {
            drop(to);
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).unwrap();
            let answer = bytes.strip_suffix(b"done").map(<[u8]>::to_vec);
            (child, answer)
        }
    }
}
