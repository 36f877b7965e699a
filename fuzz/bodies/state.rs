//! Restores arbitrary states in each device. A device accepts them or refuses them with a sentence.

use super::{
    machine,
    support::{self, Driver, Line},
};
use keiki_devices::{
    Device, State, StateError, console_log::ConsoleLog, serial::Serial, virtio::VirtioDevice,
    vmgenid::VmGenId,
};
use std::sync::Arc;

const KINDS: [(&str, u16); 9] = [
    ("virtio-mmio", 1),
    ("block", 1),
    ("net", 1),
    ("console", 1),
    ("rng", 1),
    ("balloon", 1),
    ("serial", 1),
    ("vmgenid", 1),
    ("power", 1),
];

pub fn run(data: &[u8]) {
    if let Ok(state) = postcard::from_bytes::<State>(data) {
        taken(&state);
    }
    let Some((kind, data)) = data.split_first() else { return };
    let (kind, version) = KINDS[usize::from(*kind) % KINDS.len()];
    taken(&State { kind: kind.into(), version, data: data.to_vec() });
}

/// By how many devices a state is taken.
pub fn taken(state: &State) -> usize {
    let mut taken = 0;
    taken += virtio(machine::block(), state);
    taken += virtio(machine::net(), state);
    taken += virtio(machine::console().0, state);
    taken += virtio(machine::rng(), state);
    taken += virtio(machine::balloon(), state);
    let memory = support::memory();
    let at = vm_memory::GuestAddress(0xf_f000);
    let log = ConsoleLog::new(None).unwrap();
    let devices: [Box<dyn Device>; 3] = [
        Box::new(Serial::new(log, Arc::new(Line::default()))),
        Box::new(VmGenId::new(memory, at, Box::new(Line::default())).unwrap()),
        Box::new(keiki_devices::power::Power::new().unwrap()),
    ];
    for mut device in devices {
        taken += settle(device.restore(state));
    }
    taken
}

/// As the state of the transport, and as that of the device within a good one.
fn virtio<D: VirtioDevice>(device: D, state: &State) -> usize {
    let mut driver = Driver::bare(device, support::memory());
    let taken = settle(driver.mmio.restore(state));
    if taken > 0 {
        driver.mmio.resume().unwrap();
        driver.run_some();
        driver.frozen();
    }
    settle(driver.mmio.device_mut().restore(state, 0));
    taken
}

fn settle(result: Result<(), StateError>) -> usize {
    match result {
        Ok(()) => 1,
        Err(error) => {
            assert!(error.to_string().len() > 20, "it says what is wrong");
            0
        }
    }
}
