//! Machines written to files and loaded again: whole cycles, and every way in which files can be
//! wrong.

#[path = "../../hv/tests/in_use/mod.rs"]
mod in_use;
mod monitor;

use keiki_control::{ControlError, FailureKind, Pages, Reply, Request, Role, Shape};
use keiki_hv::Kvm;
use keiki_sys::pages::PAGE;
use keiki_vmm::frozen::Frozen;
use monitor::{COUNT, LETTERS, Monitor, SILENT, Stored, TestHost, host, until};
use std::{
    fs,
    io::{Seek, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt, MetadataExt},
    },
};

fn stored(host: &TestHost, code: &[u8]) -> (Monitor, Monitor, Stored) {
    let mut machine = host.boot(code);
    machine.counts();
    let (mut zygote, _) = host.freeze(&mut machine);
    let (stored, _) = host.persist(&mut zygote, None);
    (machine, zygote, stored)
}

#[test]
fn a_machine_goes_on_from_its_files_again_and_again() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    machine.poke(0x80_0000, 1);
    let mut base = None;
    for generation in 1..=3 {
        machine.counts();
        machine.poke(0x80_0000 + generation * 4096, generation as u32);
        // A page of the base that is zero again.
        machine.poke(0x80_0000 + (generation - 1) * 4096, 0);
        let (mut zygote, _) = host.freeze(&mut machine);
        machine.kill();
        let count = zygote.peek(COUNT);
        let (stored, persisted) = host.persist(&mut zygote, base.as_deref());
        if base.is_some() {
            assert!(persisted.pages < 64 && persisted.zeroed >= 1, "{persisted:?}");
        }
        zygote.close();
        let mut loaded = host.load(&stored);
        assert_eq!(loaded.peek(COUNT), count);
        machine = host.thaw(&mut loaded);
        loaded.kill();
        for page in 0..3 {
            let value = if page == generation { page as u32 } else { 0 };
            assert_eq!(machine.peek(0x80_0000 + page * 4096), value, "page {page} of {generation}");
        }
        machine.counts();
        base = Some(stored.memory.clone());
    }
    // Only pages with content take space.
    let memory = fs::metadata(base.unwrap()).unwrap();
    assert_eq!(memory.len(), 16 << 20);
    assert!(memory.blocks() * 512 < 1 << 20, "{} KiB", memory.blocks() / 2);
}

/// The image is of one instant, whatever the parent does during the write.
#[test]
fn the_file_is_of_one_instant() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(LETTERS);
    until("it prints", || machine.console().len() > 4);
    let (mut zygote, _) = host.freeze(&mut machine);
    machine.counts();
    machine.poke(0x80_0000, 9);
    let copy = host.thaw(&mut zygote);
    copy.poke(0x80_0000, 8);
    let (stored, _) = host.persist(&mut zygote, None);
    let mut now = vec![0; 16 << 20];
    let file = fs::read(&stored.memory).unwrap();
    zygote.mem().read_exact_at(&mut now, zygote.ram_start()).unwrap();
    assert!(file == now, "the file is not what the zygote holds");
    assert_eq!(file[0x80_0000], 0);
}

/// Finding 3 once more, where it matters.
#[test]
fn the_page_map_of_a_relative_is_refused() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    machine.counts();
    let (mut zygote, _) = host.freeze(&mut machine);
    let stored = host.to_store(&zygote, 16);
    let error = host.try_persist(&mut zygote, &stored, machine.pid()).unwrap_err();
    assert_eq!(error.to_string(), "the page map belongs to another process");
    let own = zygote.pid();
    host.try_persist(&mut zygote, &stored, own).unwrap();
}

/// Why these files are refused.
fn refusal(host: &TestHost, stored: &Stored) -> String {
    match host.try_load(stored) {
        Err(ControlError::Failed { kind: FailureKind::Refused, sentence }) => sentence,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was taken"),
    }
}

fn state_of(stored: &Stored) -> Frozen {
    Frozen::from_bytes(&fs::read(&stored.state).unwrap()).unwrap()
}

/// The same machine in another state, with a matching digest.
fn with_state(host: &TestHost, stored: &Stored, frozen: &Frozen) -> Stored {
    let (path, bytes) = (host.path("state"), frozen.to_bytes().unwrap());
    fs::write(&path, &bytes).unwrap();
    Stored { state: path, digest: *blake3::hash(&bytes).as_bytes(), ..stored.clone() }
}

#[test]
fn files_that_are_wrong_are_refused_by_what_is_wrong() {
    let Some(host) = host() else { return };
    let (_machine, _zygote, stored) = stored(&host, SILENT);
    let state = fs::read(&stored.state).unwrap();
    let refused = |stored: &Stored| refusal(&host, stored);
    let with_state = |bytes: &[u8], digest: bool| {
        let path = host.path("state");
        fs::write(&path, bytes).unwrap();
        let digest = if digest { *blake3::hash(bytes).as_bytes() } else { stored.digest };
        refused(&Stored { state: path, digest, ..stored.clone() })
    };
    assert!(with_state(&state[1..], false).contains("its digest differs"));
    assert_eq!(with_state(&[], true), "the state file is truncated: it has 0 bytes, fewer than its header");
    assert!(with_state(&state[..state.len() - 1], true).contains("truncated or too long"));
    let mut bytes = state.clone();
    bytes[0] ^= 1;
    assert_eq!(with_state(&bytes, true), "the state file has the wrong first bytes");
    let mut bytes = state.clone();
    bytes[8] = 2;
    assert_eq!(with_state(&bytes, true), "the state file has version 2, this program reads version 1");
    let mut bytes = state.clone();
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(with_state(&bytes, true), "the state file is damaged: its checksum differs");
    let huge = host.path("state");
    fs::File::create(&huge).unwrap().set_len(17 << 20).unwrap();
    assert!(refused(&Stored { state: huge, ..stored.clone() }).contains("at most"));
    // The other file, and what the node says about both.
    let shape = Shape { vcpus: 2, memory_mib: 16 };
    let error = refused(&Stored { shape, ..stored.clone() });
    assert_eq!(error, "the state file is from a machine with 1 vCPUs and 16 MiB, not 2 and 16");
    let short = host.path("mem");
    fs::copy(&stored.memory, &short).unwrap();
    fs::OpenOptions::new().write(true).open(&short).unwrap().set_len(15 << 20).unwrap();
    let error = refused(&Stored { memory: short, ..stored.clone() });
    assert_eq!(error, "the memory file has 15728640 bytes, the machine has 16 MiB");
    // A blank that has refused files can still load valid ones.
    host.thaw(&mut host.load(&stored)).counts();
}

/// A machine has its working set before it runs, and its copies inherit it. The list is a hint: it
/// changes nothing else, whatever it contains.
#[test]
fn a_machine_is_given_the_pages_that_it_is_known_to_touch() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    machine.counts();
    // In one block of the file, so that RAM lies over it.
    let at = 0x80_0000;
    (0..8).for_each(|page| machine.poke(at + page * PAGE, 100 + page as u32));
    let (mut zygote, _) = host.freeze(&mut machine);
    let (stored, _) = host.persist(&mut zygote, None);
    let mut loaded = host.load(&stored);
    let list = |runs: &[(u32, u32, bool)]| {
        let runs: Vec<_> = runs
            .iter()
            .map(|(first, count, written)| Pages { first: *first, count: *count, written: *written })
            .collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&Pages::encode(&runs)).unwrap();
        file.rewind().unwrap();
        Some((Role::Pages, OwnedFd::from(file)))
    };
    let private = |copy: &Monitor| {
        let start = copy.ram_start() + at;
        let pagemap = fs::File::open(format!("/proc/{}/pagemap", copy.pid())).unwrap();
        let found = keiki_sys::pages::private_pages(&pagemap, start..start + 8 * PAGE).unwrap();
        let page = |address: u64| (address - start) / PAGE;
        found.into_iter().flat_map(|range| page(range.start)..page(range.end)).collect::<Vec<_>>()
    };
    let holds = |copy: &Monitor| {
        (0..8).for_each(|page| assert_eq!(copy.peek(at + page * PAGE), 100 + page as u32));
        copy.counts();
    };
    let first = u32::try_from(at / PAGE).unwrap();
    let good = list(&[(0, 4, false), (first, 2, false), (first + 3, 2, true)]);
    let (mut copy, thawed) = host.try_thaw_with(&mut loaded, good).unwrap();
    assert!(thawed.steps.iter().any(|step| step.name == "pages"), "{thawed:?}");
    if Kvm::open().unwrap().prefaults() {
        // Mapping a page into the guest also maps it into the monitor. The guest itself touches
        // none of them.
        let start = copy.ram_start() + at;
        let pagemap = fs::File::open(format!("/proc/{}/pagemap", copy.pid())).unwrap();
        let read = keiki_sys::pages::file_pages(&pagemap, start..start + 2 * PAGE).unwrap();
        assert_eq!(read, [std::ops::Range { start, end: start + 2 * PAGE }]);
    }
    assert_eq!(private(&copy), [3, 4]);
    holds(&copy);
    let (mut frozen, _) = host.freeze(&mut copy);
    let (grandchild, thawed) = host.try_thaw(&mut frozen).unwrap();
    assert!(thawed.steps.iter().any(|step| step.name == "pages"), "{thawed:?}");
    holds(&grandchild);
    // Empty, half a pair, no page, pages beyond the end, unreadable.
    let nowhere = fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
    let mut cut = tempfile::tempfile().unwrap();
    cut.write_all(&[0; 7]).unwrap();
    let bad = [
        list(&[]),
        Some((Role::Pages, cut.into())),
        list(&[(first, 0, false), (first, 0, true)]),
        list(&[(u32::MAX, (1 << 31) - 1, false), (u32::MAX, 9, true), (5000, 9, true)]),
        // More pages than are mapped; more copies than are made.
        list(&[(0, (1 << 31) - 1, true)]),
        list(&[(first, 1025, true)]),
        Some((Role::Pages, nowhere.into())),
    ];
    for list in bad {
        let (copy, _) = host.try_thaw_with(&mut loaded, list).unwrap();
        assert!(private(&copy).is_empty(), "an invalid list copies pages");
        holds(&copy);
    }
    host.thaw(&mut loaded).counts();
}

/// A machine of another processor is refused before it starts, with the name of the missing
/// feature.
#[test]
fn a_processor_that_is_not_here_is_refused_by_name() {
    let Some(host) = host() else { return };
    let (_machine, _zygote, stored) = stored(&host, SILENT);
    // Leaf 7, by register: EBX is number 4 of an entry, EDX number 6.
    let here = Kvm::open().unwrap().supported_cpuid().unwrap();
    let here = here.as_slice().iter().find(|entry| (entry.function, entry.index) == (7, 0)).copied().unwrap();
    let refused = |register: usize, bits: u32| {
        let mut frozen = state_of(&stored);
        let entry = frozen.cpu.entries.iter_mut().find(|entry| (entry[0], entry[1]) == (7, 0)).unwrap();
        entry[register] |= bits;
        refusal(&host, &with_state(&host, &stored, &frozen))
    };
    let lacks =
        |name: &str| format!("the processor of this host lacks {name}, which the machine was started with");
    let missing = (0..32).find(|bit| here.ebx & 1 << bit == 0 && ![0, 1, 3, 5, 7, 8].contains(bit));
    let missing: u32 = missing.expect("a processor has everything");
    assert_eq!(refused(4, 1 << missing), lacks(&format!("bit {missing} of CPUID 0x7.0 Ebx")));
    // Named features. No processor has all of them: some belong to one vendor.
    let named =
        [(10, "md_clear"), (26, "spec_ctrl"), (27, "stibp"), (28, "flush_l1d"), (29, "arch_capabilities")];
    let missing: Vec<_> = named.iter().filter(|(bit, _)| here.edx & 1 << bit == 0).collect();
    if !missing.is_empty() {
        let names: Vec<_> = missing.iter().map(|(_, name)| *name).collect();
        assert_eq!(
            refused(6, named.iter().fold(0, |bits, (bit, _)| bits | 1 << bit)),
            lacks(&names.join(", "))
        );
    }
    let mut frozen = state_of(&stored);
    frozen.cpu.version = 2;
    let error = refusal(&host, &with_state(&host, &stored, &frozen));
    assert_eq!(error, "the saved processor model has version 2, this monitor reads version 1");
    let mut frozen = state_of(&stored);
    let vendor = frozen.cpu.entries.iter_mut().find(|entry| entry[0] == 0).unwrap();
    vendor[4..].copy_from_slice(&[*b"Nobo", *b"Ever", *b"dysF"].map(u32::from_le_bytes));
    let error = refusal(&host, &with_state(&host, &stored, &frozen));
    assert!(
        error.starts_with("the machine was started on a processor from NobodysFEver, this one is from "),
        "{error}"
    );
    host.thaw(&mut host.load(&stored)).counts();
}

/// The copy finds what only KVM or a device can check. It reports the error and ends, and the
/// zygote stays usable.
#[test]
fn a_state_that_does_not_fit_ends_the_copy_alone() {
    let Some(host) = host() else { return };
    let (_machine, _zygote, stored) = stored(&host, SILENT);
    let refused = |change: &dyn Fn(&mut Frozen)| {
        let mut frozen = state_of(&stored);
        change(&mut frozen);
        let mut zygote = host.load(&with_state(&host, &stored, &frozen));
        let error = match host.try_thaw(&mut zygote) {
            Err(ControlError::Failed { kind: FailureKind::Refused, sentence }) => sentence,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it was taken"),
        };
        assert!(matches!(zygote.call(&Request::Hello), Reply::Hello(_)), "the zygote is gone");
        error
    };
    let error = refused(&|f| f.vcpus[0].msrs.push((0x1234_5678, 5)));
    assert_eq!(error, "KVM on this host refuses the value of MSR 0x12345678");
    let error = refused(&|f| f.vcpus[0].version = 2);
    assert_eq!(error, "the saved vCPU has version 2, this monitor reads version 1");
    let count = state_of(&stored).devices.len();
    let error = refused(&|f| drop(f.devices.pop()));
    assert_eq!(error, format!("the state has {} devices, this machine has {count}", count - 1));
    let error = refused(&|f| f.devices.swap(0, 1));
    assert_eq!(error, "state of the virtio-mmio device: queues differ in number from those of this device");
    host.thaw(&mut host.load(&stored)).counts();
}

/// Finding 11, through the monitor: the state of a vCPU is the same after a load and a thaw, a
/// freeze and another thaw.
#[test]
fn a_vcpu_in_use_comes_through_files_and_forks() {
    let Some(host) = host() else { return };
    let (_machine, _zygote, stored) = stored(&host, SILENT);
    let mut frozen = state_of(&stored);
    in_use::fill(&mut frozen.vcpus[0]);
    let mut zygote = host.load(&with_state(&host, &stored, &frozen));
    for round in 0..2 {
        let mut copy = host.thaw(&mut zygote);
        copy.counts();
        zygote = host.freeze(&mut copy).0;
        copy.kill();
        let (again, _) = host.persist(&mut zygote, None);
        let again = state_of(&again);
        in_use::compare(&again.vcpus[0], &frozen.vcpus[0]);
        let deadline = in_use::msr(&again.vcpus[0], in_use::TSC_DEADLINE);
        assert_eq!(deadline, Some(in_use::LATER), "round {round}");
        // It continues from where it was, in its own code.
        assert!(again.vm.clock.clock > frozen.vm.clock.clock);
    }
}
