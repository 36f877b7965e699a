//! A hostile driver: registers, descriptors, rings, freezes and thaws in any order. The device
//! survives, comes to rest, and works after a reset.

use super::bytes::Bytes;
use super::{
    machine,
    support::{self, Driver},
};
use keiki_devices::{Device, virtio::VirtioDevice};
use std::{
    io::{Read, Write},
    os::unix::net::{SocketAddr, UnixStream},
};
use vm_memory::{Bytes as _, GuestAddress};

/// Where chains of a fuzzer point: data, rings, the ends of regions, the hole, nowhere.
const PLACES: [u64; 8] = [
    2 << 20,
    0x1_0000,
    0x2_0000,
    (24 << 20) - 64,
    28 << 20,
    (32 << 20) - 64,
    (4 << 30) + 4096,
    u64::MAX - 64,
];
const LENGTHS: [u32; 8] = [0, 1, 16, 512, 513, 65_536, 16 << 20, u32::MAX];

pub fn run(data: &[u8]) {
    used(data);
}

/// The same. How many chains the device used.
pub fn used(data: &[u8]) -> u64 {
    let mut bytes = Bytes(data);
    match bytes.u8() % 5 {
        0 => play(&mut bytes, || (machine::block(), None)),
        1 => play(&mut bytes, || (machine::net(), None)),
        2 => play(&mut bytes, || (machine::rng(), None)),
        3 => play(&mut bytes, || (machine::balloon(), None)),
        _ => play(&mut bytes, || {
            let (console, address) = machine::console();
            (console, Some(address))
        }),
    }
}

fn play<D: VirtioDevice>(bytes: &mut Bytes<'_>, make: impl Fn() -> (D, Option<SocketAddr>)) -> u64 {
    let (device, mut address) = make();
    let mut driver = if bytes.u8().is_multiple_of(4) {
        Driver::bare(device, support::memory())
    } else {
        Driver::new(device)
    };
    driver.mmio.resume().unwrap();
    let mut host = None;
    for _ in 0..300 {
        if bytes.is_empty() {
            break;
        }
        let queue = usize::from(bytes.u8());
        let (action, queue) = (queue >> 2, queue & 3);
        match action % 10 {
            0 => driver.set(u64::from(bytes.u8()) * 4, bytes.u32()),
            1 | 2 => descriptor(&mut driver, queue, bytes),
            3 => driver.offer_any(queue, bytes.u16() % 300),
            4 | 5 => driver.notify(queue as u32),
            6 => driver.set_avail_index(queue, bytes.u16()),
            7 => poke(&driver, bytes),
            8 => {
                let state = driver.frozen();
                let (device, new) = make();
                driver = driver.thawed(device, &state).expect("what a device saves it takes");
                (host, address) = (None, new);
            }
            _ => talk(&mut host, address.as_ref(), bytes),
        }
        driver.mmio.process();
    }
    drop(host);
    driver.run_some();
    let index =
        |queue| driver.memory.read_obj::<u16>(GuestAddress(support::queue_base(queue) + 0x6002)).unwrap();
    let used = (0..4).map(|queue| u64::from(index(queue))).sum();
    let features = driver.offered();
    driver.negotiate(features);
    driver.run_some();
    assert_eq!(driver.get(support::STATUS), support::RUNNING);
    used
}

fn descriptor<D: VirtioDevice>(driver: &mut Driver<D>, queue: usize, bytes: &mut Bytes<'_>) {
    let pick = bytes.u8();
    let at = PLACES[usize::from(pick & 7)].wrapping_add(u64::from(bytes.u8()));
    let len = LENGTHS[usize::from(pick >> 3 & 7)].wrapping_add(u32::from(bytes.u8()) / 16);
    driver.descriptor(queue, bytes.u16() % 260, at, len, bytes.u16() & 7, bytes.u16() % 260);
}

/// Bytes where data is: headers of requests, mostly.
fn poke<D: VirtioDevice>(driver: &Driver<D>, bytes: &mut Bytes<'_>) {
    let at = (2 << 20) + u64::from(bytes.u8());
    let value = u64::from(bytes.u32()) | u64::from(bytes.u8()) << 56;
    driver.memory.write_obj(value, GuestAddress(at)).unwrap();
}

fn talk(host: &mut Option<UnixStream>, address: Option<&SocketAddr>, bytes: &mut Bytes<'_>) {
    let Some(address) = address else { return };
    let what = bytes.u8();
    match host {
        None => {
            let stream = UnixStream::connect_addr(address).unwrap();
            stream.set_nonblocking(true).unwrap();
            *host = Some(stream);
        }
        Some(_) if what.is_multiple_of(4) => *host = None,
        Some(stream) => {
            // A full socket, or a closed one, is part of the game.
            let _ = stream.write(&vec![what; usize::from(what) * 100]);
            let _ = stream.read(&mut [0; 4096]);
        }
    }
}
