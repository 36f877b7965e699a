//! A vCPU in the middle of its work, none of its state like that of a new one. For the tests of
//! `hv` and of the monitor.

use keiki_hv::state::VcpuState;

pub const TSC: u32 = 0x10;
pub const TSC_DEADLINE: u32 = 0x6e0;
/// Hyper-V times: since the start, and while the vCPU ran.
const HYPERV_TIMES: [u32; 2] = [0x4000_0020, 0x4000_0010];
/// Registers of the local APIC: spurious vector (with the enable bit), timer.
const SPURIOUS: usize = 0xf0;
const TIMER: usize = 0x320;
/// Later than any test.
pub const LATER: u64 = 1 << 60;
/// LSTAR, the page attributes, SYSENTER_CS.
const OTHERS: [(u32, u64); 3] =
    [(0xc000_0082, 0xffff_8000_1234_5000), (0x277, 0x0007_0406_0007_0406), (0x174, 0x10)];

pub fn msr(state: &VcpuState, wanted: u32) -> Option<u64> {
    state.msrs.iter().find(|(index, _)| *index == wanted).map(|(_, value)| *value)
}

fn set_msr(state: &mut VcpuState, wanted: u32, value: u64) {
    let entry = state.msrs.iter_mut().find(|(index, _)| *index == wanted);
    entry.unwrap_or_else(|| panic!("KVM does not tell MSR {wanted:#x}")).1 = value;
}

fn set_apic(state: &mut VcpuState, register: usize, value: u32) {
    for (to, from) in state.lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
        *to = from.cast_signed();
    }
}

/// Fills all state but the general and special registers, which the code of the guest uses.
pub fn fill(state: &mut VcpuState) {
    // x87, SSE and AVX enabled and in use: control words, ST0 to ST7, XMM0 to XMM15, and the upper
    // halves of YMM.
    (state.xcrs.nr_xcrs, state.xcrs.xcrs[0].value) = (1, 7);
    let area = &mut state.xsave.region;
    area[0] = 0x037f;
    area[6] = 0x1f80;
    for (at, word) in area[8..104].iter_mut().enumerate() {
        *word = 0x0101_0101 * (at as u32 % 250 + 1);
        // The last six bytes of an x87 register are unused.
        match at % 4 {
            2 if at < 32 => *word &= 0xffff,
            3 if at < 32 => *word = 0,
            _ => {}
        }
    }
    (area[128], area[129]) = (7, 0);
    for (at, word) in area[144..208].iter_mut().enumerate() {
        *word = 0xabcd_0000 + at as u32;
    }
    state.debug.db = [0x1000, 0x2000, 0x3000, 0x4000];
    // A breakpoint at address 0.
    state.debug.dr7 = 0x0000_0401;
    set_apic(state, SPURIOUS, 0x1ff);
    // Deadline mode, masked.
    set_apic(state, TIMER, 2 << 17 | 1 << 16 | 0xec);
    set_msr(state, TSC_DEADLINE, LATER);
    for (index, value) in OTHERS {
        set_msr(state, index, value);
    }
}

fn bytes<T: serde::Serialize>(part: &T) -> Vec<u8> {
    postcard::to_stdvec(part).unwrap()
}

/// The XSAVE area. KVM marks PKRU as present on every processor that has protection keys, even when
/// the guest has not enabled them.
fn enabled_xsave(state: &VcpuState) -> [u32; 1024] {
    const PKRU: u32 = 1 << 9;
    let mut area = state.xsave.region;
    area[128] &= !PKRU;
    area
}

/// Compares all state, part by part, except general and special registers and running counters.
pub fn compare(is: &VcpuState, was: &VcpuState) {
    assert_eq!(bytes(&is.xcrs), bytes(&was.xcrs), "enabled states");
    let (area, before) = (enabled_xsave(is), enabled_xsave(was));
    assert!(area == before, "FPU, SSE, AVX:\n{area:x?}\n{before:x?}");
    assert_eq!(bytes(&is.debug), bytes(&was.debug), "debug registers");
    assert_eq!(bytes(&is.events), bytes(&was.events), "events");
    assert_eq!(bytes(&is.mp_state), bytes(&was.mp_state), "running or halted");
    assert_eq!(is.lapic.regs, was.lapic.regs, "local APIC");
    let others = |state: &VcpuState| -> Vec<(u32, u64)> {
        let goes_on = |index: u32| index == TSC || HYPERV_TIMES.contains(&index);
        state.msrs.iter().filter(|(index, _)| !goes_on(*index)).copied().collect()
    };
    assert_eq!(others(is), others(was), "model-specific registers");
}
