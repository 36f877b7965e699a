//! `keiki-vmm --probe`: measures how fast KVM runs a guest on this host.
//!
//! A host may have a `/dev/kvm` that interprets every instruction. So a guest of a few bytes counts
//! down a register while the clock runs. The node reads the result before it chooses an engine.

use keiki_hv::{
    Bus, Exit, GuestRam, HugePages, Kvm, Vcpu,
    cpuid::{Baseline, CpuModel},
};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

/// Rounds of two instructions. They take no time on native KVM, and a tenth of a second or two
/// where it interprets.
const ROUNDS: u32 = 100_000;
/// How long a guest may take for one round.
const PATIENCE: Duration = Duration::from_secs(8);
const CODE: u64 = 0x1000;
const PORT: u16 = 0x10;

/// The guest: `mov ecx, ROUNDS; again: dec ecx; jnz again; out PORT, eax; jmp the beginning`.
fn code() -> Vec<u8> {
    let mut code = vec![0xb9];
    code.extend(ROUNDS.to_le_bytes());
    code.extend([0x49, 0x75, 0xfd, 0xe7, PORT as u8, 0xeb, 0xf4]);
    code
}

/// A bus without devices.
struct Nothing;

impl Bus for Nothing {
    fn port_read(&self, _: u16, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn port_write(&self, _: u16, _: &[u8]) {}
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn write(&self, _: u64, _: &[u8]) {}
}

/// Guest instructions per second, or a sentence that says why no guest runs.
pub fn instructions_per_second() -> Result<u64, String> {
    let explain = |what: &'static str| move |error: keiki_hv::Error| format!("{what}: {error}");
    let kvm = Kvm::open().map_err(explain("cannot use KVM"))?;
    let ram = GuestRam::anonymous(2 << 20, HugePages::No).map_err(explain("cannot map guest memory"))?;
    ram.memory().write_slice(&code(), GuestAddress(CODE)).map_err(|error| error.to_string())?;
    let vm = kvm.create_vm(&ram).map_err(explain("cannot make a virtual machine"))?;
    let host = kvm.supported_cpuid().map_err(explain("cannot read the processor model"))?;
    let model = CpuModel::new(&host, Baseline::Baseline, 1);
    let mut vcpu = vm.create_vcpu(0, &model).map_err(explain("cannot make a vCPU"))?;
    enter_flat(&vcpu).map_err(explain("cannot set up the vCPU"))?;
    // The first round builds page tables and is not measured.
    round(&mut vcpu)?;
    let started = Instant::now();
    round(&mut vcpu)?;
    let nanos = started.elapsed().as_nanos().max(1);
    Ok(u64::try_from(u128::from(ROUNDS) * 2 * 1_000_000_000 / nanos).unwrap_or(u64::MAX))
}

fn round(vcpu: &mut Vcpu) -> Result<(), String> {
    let started = Instant::now();
    loop {
        match vcpu.run(&Nothing) {
            Exit::Served => return Ok(()),
            Exit::End(end) => return Err(format!("a guest of a few bytes ended: {end}")),
            Exit::Interrupted if started.elapsed() > PATIENCE => {
                return Err("a guest makes no progress".into());
            }
            Exit::Interrupted => {}
        }
    }
}

/// 32-bit protected mode, every segment all of memory.
fn enter_flat(vcpu: &Vcpu) -> keiki_hv::Result<()> {
    let mut sregs = vcpu.sregs()?;
    sregs.cr0 |= 1;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        (segment.base, segment.limit, segment.selector) = (0, 0xffff_ffff, 0x10);
        (segment.present, segment.s, segment.g, segment.db, segment.dpl) = (1, 1, 1, 1, 0);
        segment.type_ = 3;
    }
    (sregs.cs.type_, sregs.cs.selector) = (11, 8);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.regs()?;
    (regs.rip, regs.rflags) = (CODE, 2);
    vcpu.set_regs(&regs)
}

#[cfg(test)]
mod tests {
    use super::{code, instructions_per_second};

    #[test]
    fn a_guest_counts_and_the_clock_tells() {
        assert_eq!(code().len(), 12);
        match instructions_per_second() {
            Ok(speed) => assert!((10_000..1_000_000_000_000).contains(&speed), "{speed}"),
            Err(why) => keiki_testing::skip("kvm", why),
        }
    }
}
