//! The virtio-mmio transport against drivers that do not keep to the rules, and states that are not
//! true.

mod support;

use keiki_devices::{Device, State, StateError, mmio::NOTIFY, rng::Rng};
use proptest::prelude::{any, proptest};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use support::{
    DRIVER_FEATURES, Driver, EVENT_IDX, INTERRUPT_ACK, INTERRUPT_STATUS, NEEDS_RESET, QUEUE_AVAIL,
    QUEUE_DESC, QUEUE_NUM, QUEUE_NUM_MAX, QUEUE_READY, QUEUE_SEL, QUEUE_USED, RUNNING, STATUS, VERSION_1,
    into, memory, queue_base,
};
use vm_memory::{Bytes, GuestAddress};

const SIZE: u16 = 64;

/// Puts a chain together, from descriptor 0 on.
type Case = Box<dyn Fn(&Driver<Rng>)>;
/// Makes a state untrue.
type Change = fn(&mut Fields);

fn rng() -> Rng {
    Rng::new().unwrap()
}

/// Features agreed on, no queue yet.
fn agreed() -> Driver<Rng> {
    let mut driver = Driver::bare(rng(), memory());
    driver.mmio.resume().unwrap();
    for status in [1, 3] {
        driver.set(STATUS, status);
    }
    driver.accept(VERSION_1);
    driver.set(STATUS, 11);
    driver
}

#[test]
fn a_driver_finds_the_device() {
    let mut driver = Driver::bare(rng(), memory());
    assert_eq!([0, 4, 8].map(|register| driver.get(register)), [0x7472_6976, 2, 4]);
    assert_eq!(driver.get(QUEUE_NUM_MAX), u32::from(SIZE));
    driver.set(QUEUE_SEL, 1);
    assert_eq!(driver.get(QUEUE_NUM_MAX), 0);
    // No shared memory.
    assert_eq!([0xb0, 0xb4, 0xb8, 0xbc].map(|register| driver.get(register)), [u32::MAX; 4]);
}

#[test]
fn features_are_agreed_on_or_not() {
    for (features, agreed) in [(VERSION_1, true), (0, false), (EVENT_IDX, false), (VERSION_1 | 1, false)] {
        let mut driver = Driver::bare(rng(), memory());
        driver.set(STATUS, 1);
        driver.accept(features);
        driver.set(STATUS, 3);
        driver.accept(features);
        driver.set(STATUS, 11);
        assert_eq!(driver.get(STATUS) == 11, agreed, "{features:#x}");
        driver.set(STATUS, RUNNING);
        assert_eq!(driver.get(STATUS) == RUNNING, agreed);
    }
    // Too late to change them; bits that do not exist are none; nobody but the device asks for a
    // reset.
    let mut driver = agreed();
    driver.set(DRIVER_FEATURES, u32::MAX);
    driver.set(STATUS, !4);
    assert_eq!(driver.get(STATUS), 11 | 128);
    driver.set(STATUS, 0);
    assert_eq!(driver.get(STATUS), 0);
}

#[test]
fn a_queue_that_makes_no_sense_is_not_taken() {
    let base = queue_base(0);
    let good = (u32::from(SIZE), base, base + 0x4000, base + 0x6000);
    let (size, desc, avail, used) = good;
    let end = support::LOW.1 as u64;
    for (size, desc, avail, used) in [
        (0, desc, avail, used),
        (3, desc, avail, used),
        (128, desc, avail, used),
        (65_535, desc, avail, used),
        (65_536 + 64, desc, avail, used),
        (size, desc + 8, avail, used),
        (size, desc, avail + 1, used),
        (size, desc, avail, used + 2),
        (size, end - 512, avail, used),
        (size, desc, end - 64, used),
        (size, desc, avail, end - 256),
        (size, 28 << 20, avail, used),
        (size, u64::MAX - 15, avail, used),
        (size, desc, u64::MAX - 1, used),
        (size, desc, avail, u64::MAX - 3),
        (size, desc, 0, used),
    ] {
        let mut driver = agreed();
        driver.set(QUEUE_NUM, size);
        for (register, at) in [(QUEUE_DESC, desc), (QUEUE_AVAIL, avail), (QUEUE_USED, used)] {
            driver.set(register, at as u32);
            driver.set(register + 4, (at >> 32) as u32);
        }
        driver.set(QUEUE_READY, 1);
        assert_eq!(driver.get(QUEUE_READY), 0, "{size} {desc:#x} {avail:#x} {used:#x}");
        assert_eq!(driver.get(STATUS), 11 | NEEDS_RESET);
        driver.set(STATUS, RUNNING);
        driver.notify(0);
        driver.run();
        // A reset mends everything.
        driver.negotiate(VERSION_1);
        let at = driver.room(32);
        assert_eq!(driver.request(0, &[into(at, 32)]), 32);
    }
}

#[test]
fn a_ready_queue_does_not_move() {
    let mut driver = Driver::new(rng());
    let at = driver.room(32);
    driver.set(QUEUE_SEL, 0);
    driver.set(QUEUE_NUM, 8);
    driver.set(QUEUE_DESC, 0x99_0000);
    driver.set(QUEUE_AVAIL, 1);
    driver.set(QUEUE_READY, 1);
    assert_eq!(driver.request(0, &[into(at, 32)]), 32);
    // Before features are agreed on there is nothing to set up.
    driver.set(STATUS, 0);
    driver.set(QUEUE_READY, 1);
    assert_eq!(driver.get(QUEUE_READY), 0);
}

#[test]
fn a_broken_ring_stops_the_device_until_it_is_reset() {
    let mut driver = Driver::new(rng());
    // More available than the queue can hold.
    driver.set_avail_index(0, SIZE + 1);
    let before = driver.interrupts();
    driver.notify(0);
    driver.run();
    assert_eq!(driver.get(STATUS), RUNNING | NEEDS_RESET);
    assert_eq!(driver.get(INTERRUPT_STATUS) & 2, 2);
    assert_eq!(driver.interrupts(), before + 1);
    (0..100).for_each(|_| driver.notify(0));
    driver.run();
    assert_eq!(driver.interrupts(), before + 1, "it is told once");
    let state = driver.frozen();
    let mut copy = driver.thawed(rng(), &state).unwrap();
    copy.run();
    assert_eq!(copy.get(STATUS), RUNNING | NEEDS_RESET, "and so is a copy");
    driver.negotiate(VERSION_1 | EVENT_IDX);
    let at = driver.room(32);
    assert_eq!(driver.request(0, &[into(at, 32)]), 32);
}

/// Chains that loop, end nowhere, or lie: each comes back with nothing written.
#[test]
fn chains_that_the_specification_forbids_come_back_empty() {
    let mut driver = Driver::new(rng());
    let at = driver.room(1 << 16);
    let table = driver.room(1 << 16);
    let indirect = move |driver: &Driver<Rng>, index: u64, at: u64, len: u32, flags: u16, next: u16| {
        support::write_descriptor(&driver.memory, table + 16 * index, at, len, flags, next);
    };
    let cases: Vec<Case> = vec![
        // To itself; to a circle; beyond the table.
        Box::new(move |driver| driver.descriptor(0, 0, at, 16, 3, 0)),
        Box::new(move |driver| {
            driver.descriptor(0, 0, at, 16, 3, 1);
            driver.descriptor(0, 1, at, 16, 3, 0);
        }),
        Box::new(move |driver| driver.descriptor(0, 0, at, 16, 3, SIZE)),
        Box::new(move |driver| driver.descriptor(0, 0, at, 16, 3, u16::MAX)),
        // Readable after writable.
        Box::new(move |driver| {
            driver.descriptor(0, 0, at, 16, 3, 1);
            driver.descriptor(0, 1, at, 16, 0, 0);
        }),
        // Outside of RAM, over its end, around the end of the address space.
        Box::new(move |driver| driver.descriptor(0, 0, 28 << 20, 16, 2, 0)),
        Box::new(move |driver| driver.descriptor(0, 0, (24 << 20) - 8, 16, 2, 0)),
        Box::new(move |driver| driver.descriptor(0, 0, u64::MAX, 16, 2, 0)),
        Box::new(move |driver| driver.descriptor(0, 0, 0, u32::MAX, 2, 0)),
        // Longer than 4 GiB in all.
        Box::new(move |driver| {
            driver.descriptor(0, 0, at, 0xffff_fff0, 3, 1);
            driver.descriptor(0, 1, at, 0xffff_fff0, 2, 0);
        }),
        // Indirect: of no size, an odd one, outside of RAM, within another, looping, too long.
        Box::new(move |driver| driver.descriptor(0, 0, table, 0, 4, 0)),
        Box::new(move |driver| driver.descriptor(0, 0, table, 17, 4, 0)),
        Box::new(move |driver| driver.descriptor(0, 0, 28 << 20, 32, 4, 0)),
        Box::new(move |driver| {
            indirect(driver, 0, table, 32, 4, 0);
            driver.descriptor(0, 0, table, 32, 4, 0);
        }),
        Box::new(move |driver| {
            indirect(driver, 0, at, 8, 3, 1);
            indirect(driver, 1, at, 8, 3, 0);
            driver.descriptor(0, 0, table, 32, 4, 0);
        }),
        Box::new(move |driver| {
            (0..4000).for_each(|nth| indirect(driver, nth, at, 1, 3, nth as u16 + 1));
            indirect(driver, 4000, at, 1, 2, 0);
            driver.descriptor(0, 0, table, 4001 * 16, 4, 0);
        }),
    ];
    for (nth, case) in cases.iter().enumerate() {
        let canary = driver.bytes(at, 64);
        case(&driver);
        driver.offer(0, 0);
        driver.notify(0);
        driver.run();
        assert_eq!(driver.used(0), Some((0, 0)), "case {nth}");
        assert_eq!(driver.bytes(at, 64), canary, "case {nth}");
    }
    // A head beyond the table cannot even be given back.
    driver.offer(0, SIZE);
    driver.notify(0);
    driver.run();
    assert_eq!(driver.get(STATUS), RUNNING | NEEDS_RESET);
    let state = driver.frozen();
    assert!(driver.thawed(rng(), &state).is_ok(), "what is broken can be frozen like everything else");
}

#[test]
fn odd_accesses_read_zeroes_and_change_nothing() {
    let mut driver = Driver::new(rng());
    let before = driver.frozen();
    for offset in [0, 1, 2, 3, 0x70, 0x71, 0x100, 0xfff, u64::from(u32::MAX), u64::MAX] {
        for len in [0, 1, 2, 3, 5, 8, 16, 4096] {
            let mut data = vec![0xee; len];
            driver.mmio.read(offset, &mut data);
            assert!(data.iter().all(|&byte| byte == 0), "{offset:#x} {len}");
            driver.mmio.write(offset, &vec![0xff; len]);
        }
    }
    driver.mmio.write(0x70 - 2, &[0; 8]);
    assert_eq!(driver.frozen(), before);
}

#[test]
fn a_storm_of_notifications_is_one() {
    let mut driver = Driver::new(rng());
    (0..100_000_u32).for_each(|nth| driver.set(NOTIFY, nth % 7));
    assert!(driver.is_ready(Duration::ZERO));
    driver.run();
    assert_eq!(driver.interrupts(), 0, "nothing was done, so there is nothing to tell");
}

#[test]
fn interrupts_are_told_and_acknowledged() {
    let mut driver = Driver::new(rng());
    let at = driver.room(32);
    driver.request(0, &[into(at, 32)]);
    assert_eq!((driver.interrupts(), driver.get(INTERRUPT_STATUS)), (1, 1));
    driver.set(INTERRUPT_ACK, 2);
    assert_eq!(driver.get(INTERRUPT_STATUS), 1);
    driver.set(INTERRUPT_ACK, 1);
    assert_eq!(driver.get(INTERRUPT_STATUS), 0);
    // The driver asked to be told of the next but one only (event index).
    driver.memory.write_obj(2_u16, GuestAddress(queue_base(0) + 0x4004 + 2 * u64::from(SIZE))).unwrap();
    driver.request(0, &[into(at, 32)]);
    assert_eq!(driver.interrupts(), 1);
    driver.request(0, &[into(at, 32)]);
    assert_eq!(driver.interrupts(), 2);
}

#[test]
fn a_paused_device_holds_still_and_forgets_nothing() {
    let mut driver = Driver::new(rng());
    driver.run();
    let at = driver.room(32);
    driver.mmio.pause(support::soon()).unwrap();
    driver.add(0, &[into(at, 32)]);
    driver.notify(0);
    assert!(!driver.is_ready(Duration::from_millis(2)));
    driver.mmio.process();
    assert_eq!(driver.used(0), None);
    let state = driver.mmio.save().unwrap();
    // A copy finds the request in its ring, without a notification.
    let mut copy = driver.thawed(rng(), &state).unwrap();
    copy.run();
    assert_eq!(copy.used(0), Some((0, 32)));
    // So would the original, whose memory this is.
    driver.mmio.resume().unwrap();
    driver.run();
    assert_eq!(driver.mmio.save().unwrap().kind, "virtio-mmio");
}

/// The fields of a transport's state, for changing one at a time.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Fields {
    status: u32,
    interrupt_status: u32,
    generation: u32,
    driver_features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    queues: Vec<Queue>,
    device: State,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Queue {
    size: u16,
    ready: bool,
    desc: u64,
    avail: u64,
    used: u64,
    next_avail: u16,
    next_used: u16,
}

fn saved() -> (Driver<Rng>, Fields) {
    let mut driver = Driver::new(rng());
    let at = driver.room(32);
    driver.request(0, &[into(at, 32)]);
    let fields = driver.frozen().unpack("virtio-mmio", 1).unwrap();
    (driver, fields)
}

fn refused(driver: &Driver<Rng>, fields: &Fields) -> StateError {
    let state = State::pack("virtio-mmio", 1, fields).unwrap();
    driver.thawed(rng(), &state).err().expect("it is refused")
}

#[test]
fn each_field_of_a_state_is_looked_at() {
    let (driver, good) = saved();
    assert!(driver.thawed(rng(), &State::pack("virtio-mmio", 1, &good).unwrap()).is_ok());
    let changes: Vec<(&str, Change)> = vec![
        ("status", |fields| fields.status = 0x100),
        ("status", |fields| fields.status = 4),
        ("status", |fields| fields.status = 9),
        ("status", |fields| fields.status = 0x30),
        ("interrupt_status", |fields| fields.interrupt_status = 4),
        ("driver_features", |fields| fields.driver_features |= 1),
        ("driver_features", |fields| fields.driver_features = 0),
        ("queues", |fields| fields.queues.clear()),
        ("queues", |fields| fields.queues.push(fields.queues[0].clone())),
        ("queues", |fields| fields.queues[0].size = 0),
        ("queues", |fields| fields.queues[0].size = 65_535),
        ("queues", |fields| fields.queues[0].size = 128),
        ("queues", |fields| fields.queues[0].desc = 28 << 20),
        ("queues", |fields| fields.queues[0].desc += 1),
        ("queues", |fields| fields.queues[0].avail = 0),
        ("queues", |fields| fields.queues[0].avail = u64::MAX - 1),
        ("queues", |fields| fields.queues[0].used += 1),
        ("queues", |fields| fields.queues[0].next_avail += 1),
        ("queues", |fields| fields.queues[0].next_used -= 1),
        ("queues", |fields| (fields.status, fields.queues[0].ready) = (3, true)),
    ];
    for (nth, (field, change)) in changes.into_iter().enumerate() {
        let mut bad = good.clone();
        change(&mut bad);
        match refused(&driver, &bad) {
            StateError::Field { field: found, .. } => assert_eq!(found, field, "change {nth}"),
            other => panic!("change {nth}: {other:?}"),
        }
    }
    let mut other = good.clone();
    other.device.kind = "net".into();
    assert!(matches!(refused(&driver, &other), StateError::Kind { wanted: "rng", .. }));
    let mut newer = good.clone();
    newer.device.version += 1;
    assert!(matches!(refused(&driver, &newer), StateError::Version { found: 2, .. }));
    // Registers that only select are what the guest says; selecting nothing is allowed.
    let mut far = good;
    (far.queue_sel, far.device_features_sel, far.driver_features_sel) = (u32::MAX, 7, 7);
    let state = State::pack("virtio-mmio", 1, &far).unwrap();
    let mut copy = driver.thawed(rng(), &state).unwrap();
    assert_eq!(copy.get(QUEUE_NUM_MAX), 0);
}

#[test]
fn a_state_cut_anywhere_is_refused() {
    let (driver, fields) = saved();
    let good = State::pack("virtio-mmio", 1, &fields).unwrap();
    for len in 0..good.data.len() {
        let cut = State { data: good.data[..len].to_vec(), ..good.clone() };
        assert!(driver.thawed(rng(), &cut).is_err(), "{len}");
    }
}

proptest! {
    /// Whatever registers a guest writes in whatever order, the device answers, and a reset makes
    /// it usable.
    #[test]
    fn any_order_of_writes_can_be_mended(writes in proptest::collection::vec((any::<u8>(), any::<u32>()), 0..200)) {
        let mut driver = Driver::bare(rng(), memory());
        driver.mmio.resume().unwrap();
        for (register, value) in writes {
            // Values that a driver might write come up often.
            let value = if value % 3 == 0 { value % 128 } else { value };
            driver.set(u64::from(register) & !3, value);
            driver.mmio.process();
        }
        driver.run();
        let state = driver.frozen();
        driver.thawed(rng(), &state).unwrap();
        driver.negotiate(VERSION_1 | EVENT_IDX);
        let at = driver.room(16);
        assert_eq!(driver.request(0, &[into(at, 16)]), 16);
    }
}
