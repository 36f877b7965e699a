//! The processor that a guest sees.
//!
//! Programs read CPUID once and rely on it from then on, so a machine can only be thawed where
//! every feature that it has seen still exists. `baseline` shows a named set that servers of the
//! last decade share: x86-64-v3, as compilers call it, and the bits against speculation attacks.
//! `host` shows all features of the host. The model is recorded either way, and a host that lacks a
//! feature is rejected with an error that names it.
//!
//! No guest sees performance counters (their state belongs to the host), asynchronous page faults
//! (a page in flight at the freeze would never arrive in a copy), or nested virtualisation.

use crate::{Error, Result};
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use serde::{Deserialize, Serialize};

/// A named set of features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub enum Baseline {
    /// Features that servers of the last decade share. Copies can move between them.
    #[default]
    Baseline,
    /// All features of this host. Copies stay on hosts like it.
    Host,
}

pub const CPU_MODEL: u32 = 1;
/// More entries than any processor has.
const MAX_ENTRIES: usize = 128;
/// The leaf with the vendor and the highest leaf.
const VENDOR: u32 = 0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// A register of feature bits, and the names of those in the baseline.
struct Word {
    leaf: u32,
    index: u32,
    register: Register,
    baseline: &'static [(u8, &'static str)],
    /// Bits that are not features: the guest sets them, or they depend on the machine.
    ignored: u32,
}

const fn word(leaf: u32, index: u32, register: Register, baseline: &'static [(u8, &'static str)]) -> Word {
    Word { leaf, index, register, baseline, ignored: 0 }
}

/// The bits of leaf 1, EDX, which AMD repeats in 0x8000_0001.
#[rustfmt::skip]
const LEAF_1_EDX: &[(u8, &str)] = &[
    (0, "fpu"), (1, "vme"), (2, "de"), (3, "pse"), (4, "tsc"), (5, "msr"), (6, "pae"), (7, "mce"), (8, "cx8"),
    (9, "apic"), (11, "sep"), (12, "mtrr"), (13, "pge"), (14, "mca"), (15, "cmov"), (16, "pat"), (17, "pse36"),
    (19, "clflush"), (23, "mmx"), (24, "fxsr"), (25, "sse"), (26, "sse2"),
];

#[rustfmt::skip]
const WORDS: &[Word] = &[
    // HT depends on the number of vCPUs.
    Word { leaf: 1, index: 0, register: Edx, baseline: LEAF_1_EDX, ignored: 1 << 28 },
    // The guest controls OSXSAVE.
    Word { leaf: 1, index: 0, register: Ecx, ignored: 1 << 27, baseline: &[
        (0, "sse3"), (1, "pclmulqdq"), (9, "ssse3"), (12, "fma"), (13, "cx16"), (17, "pcid"), (19, "sse4_1"),
        (20, "sse4_2"), (21, "x2apic"), (22, "movbe"), (23, "popcnt"), (24, "tsc_deadline"), (25, "aes"),
        (26, "xsave"), (28, "avx"), (29, "f16c"), (30, "rdrand"), (31, "hypervisor"),
    ] },
    word(6, 0, Eax, &[(2, "arat")]),
    word(7, 0, Ebx, &[
        (0, "fsgsbase"), (1, "tsc_adjust"), (3, "bmi1"), (5, "avx2"), (7, "smep"), (8, "bmi2"), (9, "erms"),
        (10, "invpcid"), (18, "rdseed"), (19, "adx"), (20, "smap"), (23, "clflushopt"),
    ]),
    // The guest controls OSPKE.
    Word { leaf: 7, index: 0, register: Ecx, ignored: 1 << 4, baseline: &[(2, "umip"), (22, "rdpid")] },
    word(7, 0, Edx, &[
        (10, "md_clear"), (26, "spec_ctrl"), (27, "stibp"), (28, "flush_l1d"), (29, "arch_capabilities"), (31, "ssbd"),
    ]),
    word(7, 1, Eax, &[]),
    word(7, 1, Edx, &[]),
    word(7, 2, Edx, &[]),
    word(0xd, 0, Eax, &[(0, "x87 state"), (1, "SSE state"), (2, "AVX state")]),
    word(0xd, 1, Eax, &[(0, "xsaveopt"), (1, "xsavec"), (2, "xgetbv1")]),
    word(0x4000_0001, 0, Eax, &[
        (0, "kvmclock"), (1, "kvm_nopiodelay"), (3, "kvmclock2"), (5, "kvm_steal_time"), (6, "kvm_pv_eoi"),
        (7, "kvm_pv_unhalt"), (9, "kvm_pv_tlb_flush"), (11, "kvm_pv_ipi"), (13, "kvm_poll_control"),
        (24, "kvmclock_stable"),
    ]),
    word(0x8000_0001, 0, Ecx, &[(0, "lahf_lm"), (4, "cr8_legacy"), (5, "abm"), (8, "3dnowprefetch")]),
    word(0x8000_0001, 0, Edx, &[
        (0, "fpu"), (1, "vme"), (2, "de"), (3, "pse"), (4, "tsc"), (5, "msr"), (6, "pae"), (7, "mce"), (8, "cx8"),
        (9, "apic"), (11, "syscall"), (12, "mtrr"), (13, "pge"), (14, "mca"), (15, "cmov"), (16, "pat"), (17, "pse36"),
        (20, "nx"), (23, "mmx"), (24, "fxsr"), (25, "fxsr_opt"), (26, "pdpe1gb"), (27, "rdtscp"), (29, "lm"),
    ]),
    word(0x8000_0007, 0, Edx, &[(8, "invariant_tsc")]),
    word(0x8000_0008, 0, Ebx, &[(12, "ibpb"), (14, "ibrs"), (15, "amd_stibp"), (24, "amd_ssbd"), (25, "virt_ssbd")]),
    word(0x8000_0021, 0, Eax, &[]),
];

/// Leaves of the baseline that are not features: vendor, caches, state sizes, hypervisor, names,
/// address sizes.
const PLAIN_LEAVES: [u32; 14] = [
    0,
    2,
    4,
    0xd,
    0x4000_0000,
    0x8000_0000,
    0x8000_0002,
    0x8000_0003,
    0x8000_0004,
    0x8000_0005,
    0x8000_0006,
    0x8000_0008,
    0x8000_001d,
    0x8000_001e,
];
/// Highest leaf of the baseline.
const LAST_LEAF: u32 = 0xd;
/// Hidden from every guest: performance counters, nested virtualisation, extended topology (ours is
/// leaf 0xb).
const HIDDEN_LEAVES: [u32; 4] = [0xa, 0xb, 0x1f, 0x8000_000a];
/// Bits of 0x4000_0001 EAX about asynchronous page faults.
const ASYNC_FAULTS: u32 = 1 << 4 | 1 << 10 | 1 << 14;
/// Nested virtualisation: VMX in leaf 1, SVM in 0x8000_0001.
const VMX: u32 = 1 << 5;
const SVM: u32 = 1 << 2;

/// The processor that a guest sees. It is the same for every vCPU except its number.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CpuModel {
    pub version: u32,
    pub baseline: Baseline,
    /// Number of vCPUs of the machine.
    pub vcpus: u8,
    /// Leaf, index, flags, EAX, EBX, ECX, EDX.
    pub entries: Vec<[u32; 7]>,
}

impl CpuModel {
    /// The model that a machine with `vcpus` vCPUs sees on this host
    /// ([`crate::Kvm::supported_cpuid`]).
    #[must_use]
    pub fn new(host: &CpuId, baseline: Baseline, vcpus: u8) -> Self {
        Self::from_host(host.as_slice(), baseline, vcpus)
    }

    fn from_host(host: &[kvm_cpuid_entry2], baseline: Baseline, vcpus: u8) -> Self {
        let mut entries = Vec::new();
        for entry in host.iter().filter(|entry| !HIDDEN_LEAVES.contains(&entry.function)) {
            let mut entry = *entry;
            match entry.function {
                1 => entry.ecx &= !VMX,
                0x8000_0001 => entry.ecx &= !SVM,
                0x4000_0001 => entry.eax &= !ASYNC_FAULTS,
                _ => {}
            }
            if baseline == Baseline::Host || keep(&mut entry) {
                entries.push(numbers(&entry));
            }
        }
        Self { version: CPU_MODEL, baseline, vcpus, entries }
    }

    /// Checks that this host can show the model. An error names the missing features.
    pub fn check(&self, host: &CpuId) -> Result<()> {
        self.check_against(host.as_slice())
    }

    fn check_against(&self, host: &[kvm_cpuid_entry2]) -> Result<()> {
        crate::state::check_version("processor model", self.version, CPU_MODEL)?;
        if self.entries.len() > MAX_ENTRIES {
            let text = format!(
                "the saved processor model has {} entries, at most {MAX_ENTRIES} are read",
                self.entries.len()
            );
            return Err(Error::State(text));
        }
        let (theirs, ours) = (vendor(&self.entries), vendor(&host.iter().map(numbers).collect::<Vec<_>>()));
        if theirs != ours {
            let text =
                format!("the machine was started on a processor from {theirs}, this one is from {ours}");
            return Err(Error::State(text));
        }
        let mut missing = Vec::new();
        for word in WORDS {
            let shown = self.entries.iter().filter(|e| (e[0], e[1]) == (word.leaf, word.index));
            let shown = shown.fold(0, |bits, entry| bits | word.register.of(entry));
            let here = host.iter().filter(|e| (e.function, e.index) == (word.leaf, word.index));
            let here = here.fold(0, |bits, entry| bits | word.register.of(&numbers(entry)));
            let lacking = shown & !here & !word.ignored;
            missing.extend((0..32).filter(|bit| lacking & 1 << bit != 0).map(|bit| word.name(bit)));
        }
        if missing.is_empty() { Ok(()) } else { Err(Error::Features(missing.join(", "))) }
    }

    /// The entries that KVM takes for vCPU `id`.
    pub(crate) fn for_vcpu(&self, id: u8) -> Result<CpuId> {
        let mut entries: Vec<_> = self.entries.iter().map(entry).collect();
        let (id, count) = (u32::from(id), u32::from(self.vcpus.max(1)));
        let shift = count.next_power_of_two().trailing_zeros();
        for entry in &mut entries {
            match entry.function {
                1 => {
                    entry.ebx = entry.ebx & 0xffff | count << 16 | id << 24;
                    entry.edx = entry.edx & !(1 << 28) | u32::from(count > 1) << 28;
                }
                // A core has its own first and second level caches. All cores share the others.
                4 if entry.eax & 0x1f != 0 => {
                    let sharers = if entry.eax >> 5 & 7 >= 3 { count - 1 } else { 0 };
                    entry.eax = entry.eax & 0x3fff | sharers << 14 | (count - 1).min(63) << 26;
                }
                0x8000_0008 => entry.ecx = shift << 12 | (count - 1),
                0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
                _ => {}
            }
        }
        // One thread per core, all cores in one package.
        let flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        entries.push(entry(&[0xb, 0, flags, 0, 1, 1 << 8, id]));
        entries.push(entry(&[0xb, 1, flags, shift, count, 2 << 8 | 1, id]));
        CpuId::from_entries(&entries).map_err(|error| Error::State(format!("processor model: {error:?}")))
    }
}

impl Register {
    fn of(self, entry: &[u32; 7]) -> u32 {
        match self {
            Eax => entry[3],
            Ebx => entry[4],
            Ecx => entry[5],
            Edx => entry[6],
        }
    }

    fn of_mut(self, entry: &mut kvm_cpuid_entry2) -> &mut u32 {
        match self {
            Eax => &mut entry.eax,
            Ebx => &mut entry.ebx,
            Ecx => &mut entry.ecx,
            Edx => &mut entry.edx,
        }
    }
}

impl Word {
    fn mask(&self) -> u32 {
        self.baseline.iter().fold(self.ignored, |mask, (bit, _)| mask | 1 << bit)
    }

    fn name(&self, bit: u8) -> String {
        match self.baseline.iter().find(|(known, _)| *known == bit) {
            Some((_, name)) => (*name).into(),
            None => format!("bit {bit} of CPUID {:#x}.{} {:?}", self.leaf, self.index, self.register),
        }
    }
}

/// Reduces an entry to the baseline. False if the guest must not see it.
fn keep(entry: &mut kvm_cpuid_entry2) -> bool {
    let plain = PLAIN_LEAVES.contains(&entry.function) || entry.function == 1;
    let words: Vec<_> = WORDS.iter().filter(|w| (w.leaf, w.index) == (entry.function, entry.index)).collect();
    if !plain && words.iter().all(|word| word.baseline.is_empty()) {
        return false;
    }
    if !plain {
        // Registers without named features are cleared.
        for register in [Eax, Ebx, Ecx, Edx] {
            if !words.iter().any(|word| word.register == register) {
                *register.of_mut(entry) = 0;
            }
        }
        // EAX of leaf 7 is the highest index.
        if entry.function == 7 {
            entry.eax = 0;
        }
    }
    for word in words {
        *word.register.of_mut(entry) &= word.mask();
    }
    match (entry.function, entry.index) {
        (0, _) => entry.eax = entry.eax.min(LAST_LEAF),
        // Sizes of what is enabled now (KVM keeps it) and at most; nothing above AVX.
        (0xd, 0) => {
            entry.ecx = if entry.eax & 4 == 0 { 0x240 } else { 0x340 };
            (entry.ebx, entry.edx) = (entry.ecx, 0);
        }
        (0xd, 1) => (entry.ebx, entry.ecx, entry.edx) = (0, 0, 0),
        (0xd, index) => return index == 2,
        _ => {}
    }
    true
}

fn vendor(entries: &[[u32; 7]]) -> String {
    let Some([_, _, _, _, ebx, ecx, edx]) = entries.iter().find(|entry| entry[0] == VENDOR) else {
        return "an unknown vendor".into();
    };
    let bytes: Vec<u8> = [ebx, edx, ecx].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.iter().map(|byte| if byte.is_ascii_graphic() { char::from(*byte) } else { '?' }).collect()
}

fn numbers(entry: &kvm_cpuid_entry2) -> [u32; 7] {
    [entry.function, entry.index, entry.flags, entry.eax, entry.ebx, entry.ecx, entry.edx]
}

fn entry(&[function, index, flags, eax, ebx, ecx, edx]: &[u32; 7]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, ..kvm_cpuid_entry2::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor with every bit of every leaf.
    fn everything() -> Vec<kvm_cpuid_entry2> {
        let mut leaves: Vec<(u32, u32)> = WORDS.iter().map(|word| (word.leaf, word.index)).collect();
        leaves.extend(PLAIN_LEAVES.iter().chain(&HIDDEN_LEAVES).map(|leaf| (*leaf, 0)));
        leaves.extend([(0xd, 2), (0xd, 17), (0x14, 0)]);
        leaves.sort_unstable();
        leaves.dedup();
        let all = u32::MAX;
        leaves.iter().map(|(leaf, index)| entry(&[*leaf, *index, 1, all, all, all, all])).collect()
    }

    fn find(model: &CpuModel, leaf: u32, index: u32) -> Option<&[u32; 7]> {
        model.entries.iter().find(|entry| (entry[0], entry[1]) == (leaf, index))
    }

    #[test]
    fn the_baseline_is_what_it_names() {
        let model = CpuModel::from_host(&everything(), Baseline::Baseline, 1);
        for word in WORDS.iter().filter(|word| !word.baseline.is_empty()) {
            let shown = find(&model, word.leaf, word.index).unwrap();
            assert_eq!(word.register.of(shown), word.mask(), "{:#x}.{}", word.leaf, word.index);
        }
        for hidden in HIDDEN_LEAVES.iter().chain(&[0x14, 0x8000_0021]) {
            assert_eq!(find(&model, *hidden, 0), None, "{hidden:#x}");
        }
        assert_eq!(find(&model, 0, 0).unwrap()[3], LAST_LEAF);
        assert_eq!(find(&model, 0xd, 0).unwrap()[3..], [7, 0x340, 0x340, 0]);
        assert_eq!(find(&model, 0xd, 17), None);
        let host = CpuModel::from_host(&everything(), Baseline::Host, 1);
        assert_eq!(find(&host, 0x4000_0001, 0).unwrap()[3] & ASYNC_FAULTS, 0);
        assert_eq!(find(&host, 0xa, 0), None);
        assert!(find(&host, 0x14, 0).is_some());
    }

    #[test]
    fn a_missing_feature_is_refused_by_name() {
        let mut host = everything();
        let model = CpuModel::from_host(&host, Baseline::Host, 1);
        model.check_against(&host).unwrap();
        for entry in &mut host {
            match (entry.function, entry.index) {
                (7, 0) => entry.ebx &= !(1 << 5 | 1 << 16),
                (1, 0) => entry.ecx &= !(1 << 27),
                _ => {}
            }
        }
        let error = model.check_against(&host).unwrap_err().to_string();
        assert_eq!(
            error,
            "the processor of this host lacks avx2, bit 16 of CPUID 0x7.0 Ebx, which the machine was started with"
        );
        // The baseline does not need the second.
        let small =
            CpuModel::from_host(&everything(), Baseline::Baseline, 1).check_against(&host).unwrap_err();
        assert_eq!(
            small.to_string(),
            "the processor of this host lacks avx2, which the machine was started with"
        );
    }

    #[test]
    fn a_wrong_record_is_refused() {
        let host = everything();
        let model = CpuModel::from_host(&host, Baseline::Host, 1);
        let newer = CpuModel { version: 2, ..model.clone() };
        assert!(newer.check_against(&host).unwrap_err().to_string().contains("has version 2"));
        let long = CpuModel { entries: vec![[0; 7]; 129], ..model.clone() };
        assert!(long.check_against(&host).unwrap_err().to_string().contains("129 entries"));
        let mut foreign = model;
        foreign.entries[0][4..].copy_from_slice(&[
            u32::from_le_bytes(*b"Genu"),
            u32::from_le_bytes(*b"ntel"),
            u32::from_le_bytes(*b"ineI"),
        ]);
        let error = foreign.check_against(&host).unwrap_err().to_string();
        assert!(error.contains("a processor from GenuineIntel, this one is from ????"), "{error}");
    }

    #[test]
    fn every_vcpu_has_its_number() {
        for vcpus in [1_u8, 2, 3, 4, 32] {
            let model = CpuModel::from_host(&everything(), Baseline::Baseline, vcpus);
            for id in 0..vcpus {
                let cpuid = model.for_vcpu(id).unwrap();
                let leaf = |leaf, index| {
                    let found = cpuid.as_slice().iter().find(|e| (e.function, e.index) == (leaf, index));
                    *found.unwrap()
                };
                assert_eq!(leaf(1, 0).ebx >> 24, u32::from(id));
                assert_eq!(leaf(1, 0).ebx >> 16 & 0xff, u32::from(vcpus));
                assert_eq!(leaf(1, 0).edx >> 28 & 1, u32::from(vcpus > 1));
                assert_eq!((leaf(0xb, 1).edx, leaf(0xb, 1).ebx), (id.into(), vcpus.into()));
                assert!(1 << leaf(0xb, 1).eax >= u32::from(vcpus));
            }
        }
    }
}
