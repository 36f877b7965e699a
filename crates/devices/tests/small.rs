//! Entropy, balloon, serial port, generation ID.

mod support;

use keiki_devices::{
    Device, Interrupt, State, StateError,
    balloon::{Balloon, Discard},
    console_log::ConsoleLog,
    rng::{MAX_REQUEST, PER_TICK, Rng, TICK},
    serial::Serial,
    virtio::VirtioDevice,
    vmgenid::VmGenId,
};
use std::{
    io::{self, Read, Seek},
    sync::{Arc, Mutex},
    time::Instant,
};
use support::{Driver, Line, into, memory, out, soon};
use vm_memory::{Bytes, GuestAddress};

#[test]
fn entropy_is_capped_per_request_and_in_time() {
    let mut driver = Driver::new(Rng::new().unwrap());
    let at = driver.room(1 << 20);
    assert_eq!(driver.request(0, &[into(at, 32)]), 32);
    let first = driver.bytes(at, 32);
    assert_eq!(driver.request(0, &[into(at, 16), into(at + 16, 16)]), 32);
    assert_ne!(driver.bytes(at, 32), first);
    assert_eq!(driver.request(0, &[into(at, 1 << 20)]) as usize, MAX_REQUEST);
    assert_eq!(driver.request(0, &[out(at, 64)]), 0, "nothing to write to");
    // A guest gets everything it asks for, but not at once.
    let begun = Instant::now();
    let mut got = 0;
    for _ in 0..3 * PER_TICK / MAX_REQUEST {
        driver.add(0, &[into(at, MAX_REQUEST as u32)]);
        driver.notify(0);
        driver.run_until(|driver| {
            driver.used(0).is_some_and(|(_, len)| {
                got += len as usize;
                true
            })
        });
    }
    assert!(got > 2 * PER_TICK);
    assert!(begun.elapsed() >= TICK, "{:?}", begun.elapsed());
    // A copy gets other bytes.
    let state = driver.frozen();
    let mut copy = driver.thawed(Rng::new().unwrap(), &state).unwrap();
    std::thread::sleep(TICK);
    driver.request(0, &[into(at, 64)]);
    let ours = driver.bytes(at, 64);
    let more = copy.room(64);
    let _ = copy.request(0, &[into(more, 64)]);
    assert_ne!(copy.bytes(more, 64), ours);
}

#[derive(Debug, Default)]
struct Seen(Mutex<Vec<(u64, u64)>>);

struct Recorder(Arc<Seen>);

impl Discard for Recorder {
    fn discard(&self, start: GuestAddress, bytes: u64) -> io::Result<()> {
        assert!(start.0.is_multiple_of(4096) && bytes.is_multiple_of(4096) && bytes > 0);
        self.0.0.lock().unwrap().push((start.0, bytes));
        Ok(())
    }
}

fn balloon() -> (Balloon, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    (Balloon::new(Box::new(Recorder(Arc::clone(&seen)))), seen)
}

#[test]
fn memory_that_is_reported_or_given_up_is_discarded_if_it_is_there() {
    let (device, seen) = balloon();
    let mut driver = Driver::new(device);
    let taken = || std::mem::take(&mut *seen.0.lock().unwrap());
    let mib = 1 << 20;
    driver.request(2, &[into(8 * mib, 2 << 20), into(12 * mib + 100, 8192), into(13 * mib + 1, 4096)]);
    assert_eq!(taken(), [(8 * mib, 2 << 20), (12 * mib + 4096, 4096)], "whole pages only");
    let pages = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let list = driver.data(&pages(&[2048, 2049, 2050, 2060, 0x10_0000, u32::MAX, 7168]));
    driver.request(0, &[list]);
    assert_eq!(
        taken(),
        [(8 * mib, 3 * 4096), (2060 * 4096, 4096), (4 << 30, 4096)],
        "not the hole, not the beyond"
    );
    let list = driver.data(&pages(&[2048]));
    driver.request(1, &[list]);
    assert!(taken().is_empty(), "pages taken back are there already");
    // More page numbers than any driver sends.
    let list = driver.data(&pages(&vec![3000; 5000]));
    driver.request(0, &[list]);
    assert_eq!(taken().len(), 1024);
    // Without the feature, reports have no effect.
    driver.negotiate(support::VERSION_1);
    driver.request(2, &[into(8 * mib, 4096)]);
    assert!(taken().is_empty());
}

#[test]
fn a_target_is_told_and_survives_a_freeze() {
    let mut driver = Driver::new(balloon().0);
    let before = driver.interrupts();
    let generation = driver.get(0xfc);
    // No code here sets a target, but the format of the state has one.
    let target = State::pack("balloon", 1, &(1234_u32, 0_u32)).unwrap();
    driver.mmio.device_mut().restore(&target, 0).unwrap();
    driver.mmio.config_changed();
    assert_eq!(driver.interrupts(), before + 1);
    assert_ne!(driver.get(0xfc), generation);
    assert_eq!(driver.get(support::INTERRUPT_STATUS) & 2, 2);
    assert_eq!(driver.get(support::CONFIG), 1234);
    driver.set(support::CONFIG + 4, 1000);
    let state = driver.frozen();
    let mut copy = driver.thawed(balloon().0, &state).unwrap();
    assert_eq!(copy.mmio.device().actual_pages(), 1000);
    assert_eq!((copy.get(support::CONFIG), copy.get(support::CONFIG + 4)), (1234, 1000));
    assert!(copy.interrupts() > 0, "the pending interrupt is raised again");
}

fn console() -> (std::fs::File, ConsoleLog) {
    let file = tempfile::tempfile().unwrap();
    (file.try_clone().unwrap(), ConsoleLog::new(Some(file)).unwrap())
}

fn text(mut file: std::fs::File) -> String {
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn what_a_kernel_prints_is_in_the_log() {
    let (file, log) = console();
    let line = Arc::new(Line::default());
    let mut serial = Serial::new(log, Arc::clone(&line) as Arc<dyn Interrupt>);
    // Interrupt when there is room.
    serial.write(1, &[2]);
    for byte in b"Linux version\r\n" {
        let mut status = [0];
        serial.read(5, &mut status);
        assert_eq!(status[0] & 0x20, 0x20, "there is always room");
        serial.write(0, &[*byte]);
    }
    assert!(line.0.load(std::sync::atomic::Ordering::SeqCst) > 0);
    // Odd widths and offsets do nothing.
    serial.write(0, b"no");
    serial.write(0, b"");
    serial.write(8, b"n");
    serial.write(u64::MAX, b"n");
    let mut wide = [1; 8];
    serial.read(0, &mut wide);
    assert_eq!(wide, [0; 8]);
    serial.write(3, &[0x1b]);
    let state = serial.save().unwrap();
    let (other, log) = console();
    let line = Arc::new(Line::default());
    let mut copy = Serial::new(log, Arc::clone(&line) as Arc<dyn Interrupt>);
    copy.resume().unwrap();
    assert_eq!(line.0.load(std::sync::atomic::Ordering::SeqCst), 0, "the guest has not enabled it");
    copy.restore(&state).unwrap();
    copy.resume().unwrap();
    assert_eq!(
        line.0.load(std::sync::atomic::Ordering::SeqCst),
        1,
        "what may have been lost is raised again"
    );
    assert_eq!(copy.save().unwrap(), state);
    copy.write(0, b"c");
    drop((serial, copy));
    assert_eq!(text(file), "Linux version\r\n");
    assert_eq!(text(other), "c");
}

#[test]
fn a_flood_fills_neither_disk_nor_memory() {
    let (file, log) = console();
    let mut serial = Serial::new(log, Arc::new(Line::default()));
    // Loop mode: the guest writes what it could read, and never reads it.
    serial.write(4, &[0x10]);
    (0..10_000).for_each(|_| serial.write(0, b"x"));
    assert!(serial.save().unwrap().data.len() < 200);
    serial.write(4, &[0]);
    (0..2_000_000).for_each(|_| serial.write(0, b"x"));
    drop(serial);
    assert!(file.metadata().unwrap().len() <= 256 * 1024);
}

#[test]
fn a_serial_state_that_is_none_is_refused() {
    let (_, log) = console();
    let mut serial = Serial::new(log, Arc::new(Line::default()));
    let fields = (1_u8, 2_u8, 3_u8, 4_u8, 5_u8, 6_u8, 7_u8, 8_u8, 9_u8, vec![1_u8; 1000]);
    let long = State::pack("serial", 1, &fields).unwrap();
    assert!(matches!(serial.restore(&long), Err(StateError::Field { field: "input", .. })));
    assert!(matches!(
        serial.restore(&State::pack("serial", 9, &()).unwrap()),
        Err(StateError::Version { .. })
    ));
    assert!(matches!(serial.restore(&State::pack("rng", 1, &()).unwrap()), Err(StateError::Kind { .. })));
}

#[test]
fn a_copy_hears_that_it_is_another_machine() {
    let memory = memory();
    let line = Arc::new(Line::default());
    let raised = || line.0.load(std::sync::atomic::Ordering::SeqCst);
    let at = GuestAddress(0xf_f000);
    assert!(VmGenId::new(memory.clone(), GuestAddress(28 << 20), Box::new(Line::default())).is_err());
    let mut device = VmGenId::new(memory.clone(), at, Box::new(Arc::clone(&line))).unwrap();
    device.resume().unwrap();
    assert_eq!(raised(), 0);
    device.pause(soon()).unwrap();
    let state = device.save().unwrap();
    let mut copy = VmGenId::new(memory.clone(), at, Box::new(Arc::clone(&line))).unwrap();
    copy.restore(&state).unwrap();
    copy.set([7; 16]).unwrap();
    assert_eq!(raised(), 0, "not before it runs");
    copy.resume().unwrap();
    assert_eq!(raised(), 1);
    let mut id = [0; 16];
    memory.read_slice(&mut id, at).unwrap();
    assert_eq!(id, [7; 16]);
    let mut elsewhere = VmGenId::new(memory, GuestAddress(0x1000), Box::new(Line::default())).unwrap();
    assert!(matches!(elsewhere.restore(&state), Err(StateError::Field { field: "address", .. })));
}
