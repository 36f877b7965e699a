//! Machines that run, stop and are copied: the findings of the design, on a guest of a few bytes.

mod tiny;

use keiki_hv::{Cpus, End, Exit, state::VcpuState};
use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};
use tiny::{COUNT, COUNTER, EVERY_EXIT, Log, in_child, kvm, machine, ram, read_u32, restore, save};
use vm_memory::{Bytes, GuestAddress};

const SECOND: Duration = Duration::from_secs(1);

/// Runs one vCPU until it has served `exits` more accesses.
fn serve(vcpu: &mut keiki_hv::Vcpu, log: &Log, exits: usize) {
    for _ in 0..exits {
        while vcpu.run(log) != Exit::Served {}
    }
}

/// The first accesses of an undisturbed guest.
fn reference(kvm: &keiki_hv::Kvm, exits: usize) -> Vec<(u8, u32)> {
    let ram = ram(4);
    let log = Log::default();
    let (_vm, mut vcpus, _) = machine(kvm, &ram, EVERY_EXIT, 1);
    serve(&mut vcpus[0], &log, exits);
    log.take()
}

#[test]
fn the_guest_does_what_it_is_meant_to() {
    let Some(kvm) = kvm() else { return };
    let accesses = reference(&kvm, 40);
    let kinds: Vec<u8> = accesses.iter().map(|(kind, _)| *kind).collect();
    let round = [0x10, 0x50, 0xd0, 0xd8, 0x30, 0x30, 0x30, 0x58, 0x58, 0x58];
    assert_eq!(kinds[..20], [round, round].concat());
    // Counted once, read back what it was answered, and wrote that.
    assert_eq!(
        accesses[..7],
        [(0x10, 1), (0x50, 1001), (0xd0, 1001), (0xd8, 1002), (0x30, 1), (0x30, 1001), (0x30, 1002)]
    );
    assert_eq!(accesses[10], (0x10, 2));
}

/// Finding 1, at every kind of exit: a copy continues with the next access, whichever was the last.
#[test]
fn a_copy_replays_nothing() {
    let Some(kvm) = kvm() else { return };
    let wanted = reference(&kvm, 60);
    for exits in 1..=12 {
        let ram = ram(4);
        let log = Log::default();
        let (vm, mut vcpus, model) = machine(&kvm, &ram, EVERY_EXIT, 1);
        serve(&mut vcpus[0], &log, exits);
        vcpus[0].complete_exit(&log).unwrap();
        let state = save(&vm, &vcpus);
        let before = log.len();
        let go_on = |vcpu: &mut keiki_hv::Vcpu| {
            serve(vcpu, &log, 15);
            log.take()
        };
        let child = in_child(&[kvm.as_fd()], || {
            let (_vm, mut vcpus) = restore(&kvm, &ram, &model, &state);
            postcard::to_stdvec(&go_on(&mut vcpus[0])).unwrap()
        });
        let child: Vec<(u8, u32)> = postcard::from_bytes(&child.expect("the copy failed")).unwrap();
        let parent = go_on(&mut vcpus[0]);
        assert!(child.len() > before && parent.len() > before);
        assert_eq!(child, wanted[..child.len()], "the copy, after {exits} exits");
        assert_eq!(parent, wanted[..parent.len()], "the parent, after {exits} exits");
    }
}

/// The test above can fail: it does without [`keiki_hv::Vcpu::complete_exit`].
#[test]
fn unsettled_state_would_replay() {
    let Some(kvm) = kvm() else { return };
    let wanted = reference(&kvm, 60);
    let mut replayed = 0;
    for exits in 1..=6 {
        let ram = ram(4);
        let log = Log::default();
        let (vm, mut vcpus, model) = machine(&kvm, &ram, EVERY_EXIT, 1);
        serve(&mut vcpus[0], &log, exits);
        let state = save(&vm, &vcpus);
        drop((vm, vcpus));
        let (_vm, mut vcpus) = restore(&kvm, &ram, &model, &state);
        serve(&mut vcpus[0], &log, 10);
        let seen = log.take();
        replayed += usize::from(seen != wanted[..seen.len()]);
    }
    assert!(replayed > 0, "nothing was replayed: settling is not tested by these exits");
}

#[test]
fn parent_and_copy_do_not_see_each_other() {
    let Some(kvm) = kvm() else { return };
    let ram = ram(16);
    let log = Log::default();
    let (vm, mut vcpus, model) = machine(&kvm, &ram, COUNTER, 1);
    ram.memory().write_obj(7_u32, GuestAddress(8 << 20)).unwrap();
    serve(&mut vcpus[0], &log, 5);
    vcpus[0].complete_exit(&log).unwrap();
    let state = save(&vm, &vcpus);
    let copy = |rounds: usize, value: u32| {
        in_child(&[kvm.as_fd()], || {
            let (_vm, mut vcpus) = restore(&kvm, &ram, &model, &state);
            serve(&mut vcpus[0], &log, rounds);
            let seen = read_u32(&ram, 8 << 20);
            ram.memory().write_obj(value, GuestAddress(8 << 20)).unwrap();
            postcard::to_stdvec(&(read_u32(&ram, COUNT), seen)).unwrap()
        })
        .map(|bytes| postcard::from_bytes::<(u32, u32)>(&bytes).unwrap())
    };
    assert_eq!(copy(100, 8), Some((105, 7)));
    assert_eq!((read_u32(&ram, COUNT), read_u32(&ram, 8 << 20)), (5, 7));
    serve(&mut vcpus[0], &log, 20);
    ram.memory().write_obj(9_u32, GuestAddress(8 << 20)).unwrap();
    assert_eq!(read_u32(&ram, COUNT), 25);
    // A second copy made later has the memory that the parent has by then. That is why a freeze
    // forks at once and thaws fork from the copy.
    assert_eq!(copy(1, 8).map(|(_, seen)| seen), Some(9));
}

/// A copy that kept pages of KVM, or any descriptor, would keep the whole virtual machine of its
/// parent.
#[test]
fn a_copy_holds_nothing_of_the_parents_machine() {
    let Some(kvm) = kvm() else { return };
    let ram = ram(4);
    let (_vm, _vcpus, _) = machine(&kvm, &ram, COUNTER, 2);
    let own = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(own.contains("kvm-vcpu"), "this test looks for the wrong name");
    let seen = in_child(&[kvm.as_fd()], || {
        let mut seen = std::fs::read_to_string("/proc/self/maps").unwrap();
        for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
            if let Ok(target) = std::fs::read_link(entry.unwrap().path()) {
                seen += &format!("fd {}\n", target.display());
            }
        }
        seen.into_bytes()
    });
    let seen = String::from_utf8(seen.expect("the copy failed")).unwrap();
    assert!(!seen.contains("kvm-vcpu") && !seen.contains("kvm-vm"), "{seen}");
    assert!(seen.contains("fd /dev/kvm"), "{seen}");
    let open: Vec<_> = seen.lines().filter(|line| line.starts_with("fd ")).collect();
    // Standard ones, KVM, the pipe, and the directory being read.
    assert!(open.len() <= 6, "{open:?}");
}

#[test]
fn vcpus_are_parked_again_and_again() {
    let Some(kvm) = kvm() else { return };
    let ram = ram(4);
    let log = Arc::new(Log::default());
    let (vm, vcpus, model) = machine(&kvm, &ram, COUNTER, 2);
    let cpus = Cpus::start(vcpus, log.clone(), || {}).unwrap();
    assert!(cpus.is_parked());
    let mut last = 0;
    for round in 0..300 {
        cpus.run();
        while read_u32(&ram, COUNT) == last {
            std::hint::spin_loop();
        }
        assert!(cpus.each(|_| Ok(())).is_err(), "running vCPUs are not to be looked at");
        cpus.park(SECOND).unwrap();
        last = read_u32(&ram, COUNT);
        let accesses = log.len();
        if round % 50 == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!((read_u32(&ram, COUNT), log.len()), (last, accesses), "parked, and it continues");
    }
    assert_eq!(cpus.ended(), None);
    // The same with threads: a copy continues from where both stood.
    let states = cpus.save().unwrap();
    let state = postcard::to_stdvec(&(vm.save().unwrap(), states)).unwrap();
    let child = in_child(&[kvm.as_fd()], || {
        let (_vm, vcpus) = restore(&kvm, &ram, &model, &state);
        let log = Arc::new(Log::default());
        let cpus = Cpus::start(vcpus, log.clone(), || {}).unwrap();
        cpus.run();
        while log.len() < 50 {
            std::thread::yield_now();
        }
        cpus.park(SECOND).unwrap();
        let count = read_u32(&ram, COUNT);
        std::mem::forget(cpus);
        count.to_le_bytes().to_vec()
    });
    let count = u32::from_le_bytes(child.expect("the copy failed").try_into().unwrap());
    assert!(count > last + 20, "{count} {last}");
    assert_eq!(read_u32(&ram, COUNT), last);
}

#[test]
fn a_guest_that_ends_says_so() {
    let Some(kvm) = kvm() else { return };
    let ram = ram(4);
    // No interrupt table and an invalid instruction: a triple fault.
    let (_vm, vcpus, _) = machine(&kvm, &ram, &[0x0f, 0x0b], 1);
    vcpus[0]
        .set_sregs(&{
            let mut sregs = vcpus[0].sregs().unwrap();
            sregs.idt.limit = 0;
            sregs
        })
        .unwrap();
    let (said, end) = std::sync::mpsc::channel();
    let said = std::sync::Mutex::new(said);
    let on_end = move || said.lock().unwrap().send(()).unwrap();
    let cpus = Cpus::start(vcpus, Arc::new(Log::default()), on_end).unwrap();
    cpus.run();
    end.recv_timeout(10 * SECOND).unwrap();
    assert!(matches!(cpus.ended(), Some(End::Shutdown | End::Failed(_))), "{:?}", cpus.ended());
    // It can still be parked and dropped.
    cpus.park(SECOND).unwrap();
}

/// No time passes for a guest while it is frozen.
#[test]
fn clocks_go_on_from_where_they_stood() {
    let Some(kvm) = kvm() else { return };
    let ram = ram(4);
    let log = Log::default();
    let (vm, mut vcpus, model) = machine(&kvm, &ram, COUNTER, 1);
    serve(&mut vcpus[0], &log, 3);
    vcpus[0].complete_exit(&log).unwrap();
    let state = save(&vm, &vcpus);
    drop((vm, vcpus));
    let frozen = Duration::from_millis(800);
    std::thread::sleep(frozen);
    let started = Instant::now();
    let (vm, vcpus) = restore(&kvm, &ram, &model, &state);
    let (before, after): (keiki_hv::state::VmState, _) =
        (postcard::from_bytes(&state).unwrap(), vm.save().unwrap());
    let states: (keiki_hv::state::VmState, Vec<VcpuState>) = postcard::from_bytes(&state).unwrap();
    let passed = Duration::from_nanos(after.clock.clock - before.clock.clock);
    assert!(passed < frozen / 2 + started.elapsed(), "the clock went on while frozen: {passed:?}");
    let fresh = machine(&kvm, &ram, COUNTER, 1);
    fresh.1[0].set_msrs(&[(0x10, 1)]).unwrap();
    let tsc =
        |state: &VcpuState| state.msrs.iter().find(|(index, _)| *index == 0x10).map(|(_, value)| *value);
    if tsc(&fresh.1[0].save().unwrap()) > tsc(&states.1[0]) {
        keiki_testing::skip("tsc", "this KVM shows the host's time stamp counter whatever is set");
        return;
    }
    let (was, is) = (tsc(&states.1[0]).unwrap(), tsc(&vcpus[0].save().unwrap()).unwrap());
    let khz = u64::from(states.1[0].tsc_khz.max(1_000_000));
    let ms = is.wrapping_sub(was) / khz;
    assert!(u128::from(ms) < (frozen / 2 + started.elapsed()).as_millis(), "the counter went on: {ms} ms");
}

#[test]
fn a_state_of_something_else_is_refused() {
    let Some(kvm) = kvm() else { return };
    let ram = ram(4);
    let (vm, vcpus, _) = machine(&kvm, &ram, COUNTER, 2);
    let refused = |change: &dyn Fn(&mut VcpuState)| {
        let mut state = vcpus[0].save().unwrap();
        change(&mut state);
        vcpus[0].restore(&state).expect_err("it was taken").to_string()
    };
    assert_eq!(refused(&|s| s.version = 2), "the saved vCPU has version 2, this monitor reads version 1");
    assert_eq!(refused(&|s| s.id = 1), "the saved vCPU is number 1, not 0");
    assert!(refused(&|s| s.msrs.push((0x1234_5678, 5))).contains("MSR 0x12345678"));
    assert!(refused(&|s| s.xcrs.nr_xcrs = 1000).contains("KVM_SET_XCRS"));
    assert!(refused(&|s| s.mp_state.mp_state = 77).contains("KVM_SET_MP_STATE"));
    let refused = |change: &dyn Fn(&mut keiki_hv::state::VmState)| {
        let mut state = vm.save().unwrap();
        change(&mut state);
        vm.restore(&state).expect_err("it was taken").to_string()
    };
    assert!(refused(&|s| s.version = 9).contains("machine has version 9"));
    assert!(refused(&|s| s.ioapic.chip_id = 0).contains("I/O APIC claims to be interrupt controller 0"));
    assert!(refused(&|s| s.pic_master.chip_id = 77).contains("first PIC"));
    // A valid state is still accepted.
    vcpus[0].restore(&vcpus[0].save().unwrap()).unwrap();
    vm.restore(&vm.save().unwrap()).unwrap();
}
