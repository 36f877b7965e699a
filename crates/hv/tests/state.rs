//! Finding 11: all state of a vCPU survives a save and a restore, but only in this order.

mod in_use;
mod tiny;

use in_use::{LATER, TSC, TSC_DEADLINE, compare, fill, msr};
use keiki_hv::{Vcpu, state::VcpuState};
use tiny::{COUNTER, kvm, machine, ram, restore, save};

fn in_use(vcpu: &Vcpu) -> VcpuState {
    let mut state = vcpu.save().unwrap();
    (state.regs.rax, state.regs.r15, state.regs.rflags) = (0x1111_2222_3333_4444, 0x5555, 0x246);
    state.sregs.cr2 = 0x7777_0000;
    fill(&mut state);
    state
}

fn registers(state: &VcpuState) -> Vec<u8> {
    postcard::to_stdvec(&(state.regs, state.sregs)).unwrap()
}

#[test]
fn all_of_a_vcpu_comes_through() {
    let Some(kvm) = kvm() else { return };
    let first = ram(4);
    let (_vm, vcpus, _) = machine(&kvm, &first, COUNTER, 1);
    let wanted = in_use(&vcpus[0]);
    // The test is not empty: a new vCPU has none of this state.
    let new = vcpus[0].save().unwrap();
    assert!(new.xsave.region != wanted.xsave.region && new.debug.db != wanted.debug.db);
    assert_ne!(msr(&new, TSC_DEADLINE), Some(LATER));
    // Into a second machine, and through bytes into a third.
    let second = ram(4);
    let (vm, vcpus, model) = machine(&kvm, &second, COUNTER, 1);
    vcpus[0].restore(&wanted).unwrap();
    let saved = vcpus[0].save().unwrap();
    compare(&saved, &wanted);
    assert_eq!(registers(&saved), registers(&wanted));
    let state = save(&vm, &vcpus);
    drop((vm, vcpus));
    let (_vm, vcpus) = restore(&kvm, &second, &model, &state);
    let third = vcpus[0].save().unwrap();
    compare(&third, &wanted);
    assert_eq!(registers(&third), registers(&wanted));
    // The counter continues, neither from zero nor from much later.
    let counter = |state: &VcpuState| msr(state, TSC).unwrap();
    let passed = counter(&third).wrapping_sub(counter(&saved));
    let second = u64::from(third.tsc_khz.max(1_000_000)) * 1000;
    assert!(passed < 20 * second, "{} then {}", counter(&saved), counter(&third));
}

/// Why the order matters: a deadline that is restored before its APIC is lost.
#[test]
fn a_deadline_before_its_timer_is_lost() {
    let Some(kvm) = kvm() else { return };
    let first = ram(4);
    let (_vm, vcpus, _) = machine(&kvm, &first, COUNTER, 1);
    let wanted = in_use(&vcpus[0]);
    let deadline = |vcpu: &Vcpu| msr(&vcpu.save().unwrap(), TSC_DEADLINE).unwrap();
    vcpus[0].set_msrs(&[(TSC_DEADLINE, LATER)]).unwrap();
    vcpus[0].set_lapic(&wanted.lapic).unwrap();
    assert_ne!(deadline(&vcpus[0]), LATER, "this KVM keeps it: the order does not matter to it");
    vcpus[0].set_msrs(&[(TSC_DEADLINE, LATER)]).unwrap();
    assert_eq!(deadline(&vcpus[0]), LATER);
}
