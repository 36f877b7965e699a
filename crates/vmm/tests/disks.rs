//! Machines with several disks, which the guest finds, writes and reads through their queues, and
//! which freeze together.

mod monitor;

use keiki_control::{ControlError, Reply, Request, Role};
use monitor::{DISK, Monitor, TestHost, borrow, host, until};
use std::{fs::File, os::unix::fs::FileExt, path::PathBuf};

/// Follows commands in memory: ORDER is 1 to write a register and 2 to read one, then the address,
/// then the value.
#[rustfmt::skip]
const PUPPET: &[u8] = &[
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00,       // inc dword [COUNT]
    0xa1, 0x00, 0x30, 0x00, 0x00,             // mov eax, [ORDER]
    0x85, 0xc0,                               // test eax, eax
    0x74, 0xf1,                               // jz the beginning
    0x8b, 0x3d, 0x04, 0x30, 0x00, 0x00,       // mov edi, [ORDER + 4]
    0x83, 0xf8, 0x02,                         // cmp eax, 2
    0x74, 0x09,                               // je +9
    0xa1, 0x08, 0x30, 0x00, 0x00,             // mov eax, [ORDER + 8]
    0x89, 0x07,                               // mov [edi], eax
    0xeb, 0x07,                               // jmp +7
    0x8b, 0x07,                               // mov eax, [edi]
    0xa3, 0x0c, 0x30, 0x00, 0x00,             // mov [ORDER + 12], eax
    0xc7, 0x05, 0x00, 0x30, 0x00, 0x00,       // mov dword [ORDER], 0
    0x00, 0x00, 0x00, 0x00,
    0xeb, 0xca,                               // jmp the beginning
];
const ORDER: u64 = 0x3000;

/// Windows of the root disk and of additional disks.
const ROOT: u64 = 0xc000_0000;
const fn further(number: u64) -> u64 {
    ROOT + (5 + number) * 0x1000
}

/// The rings and the data of this driver, a part for each disk.
fn area(window: u64) -> u64 {
    0x40_0000 + (window - ROOT) * 16
}

const DATA: u64 = 0x4000;
const READ_ONLY: u32 = 1 << 5;

/// The simplest virtio-blk driver: one request at a time.
struct Driver<'a>(&'a Monitor);

impl Driver<'_> {
    fn order(&self, what: u32, address: u64, value: u32) -> u32 {
        self.0.poke(ORDER + 4, address as u32);
        self.0.poke(ORDER + 8, value);
        self.0.poke(ORDER, what);
        until("the guest does it", || self.0.peek(ORDER) == 0);
        self.0.peek(ORDER + 12)
    }

    fn set(&self, register: u64, value: u32) {
        self.order(1, register, value);
    }

    fn get(&self, register: u64) -> u32 {
        self.order(2, register, 0)
    }

    /// Capacity in bytes, and features.
    fn look(&self, window: u64) -> (u64, u32) {
        assert_eq!((self.get(window), self.get(window + 8)), (0x7472_6976, 2), "no disk at {window:#x}");
        self.set(window + 0x14, 0);
        let features = self.get(window + 0x10);
        (u64::from(self.get(window + 0x100)) * 512, features)
    }

    fn start(&self, window: u64) {
        let base = area(window);
        for (register, value) in [
            (0x70, 0),
            (0x70, 3),
            (0x24, 0),
            (0x20, 1 << 9),
            (0x24, 1),
            (0x20, 1),
            (0x70, 11),
            (0x30, 0),
            (0x38, 4),
            (0x80, base as u32),
            (0x84, 0),
            (0x90, base as u32 + 0x1000),
            (0x94, 0),
            (0xa0, base as u32 + 0x2000),
            (0xa4, 0),
            (0x44, 1),
            (0x70, 15),
        ] {
            self.set(window + register, value);
        }
        assert_eq!(self.get(window + 0x70), 15, "the device does not run");
    }

    /// Transfers one sector. Returns the status.
    fn request(&self, window: u64, write: bool, sector: u32) -> u8 {
        let (memory, base) = (self.0, area(window));
        let (header, data, status) = (base + 0x3000, base + DATA, base + 0x3100);
        [u32::from(write), 0, sector, 0]
            .iter()
            .zip(0..)
            .for_each(|(word, at)| memory.poke(header + at * 4, *word));
        memory.poke(status, 0xff);
        // Address, length, flags and next: more follows is 1, the device writes is 2.
        for (at, (to, len, flags, next)) in
            (0..).zip([(header, 16, 1, 1), (data, 512, if write { 1 } else { 3 }, 2), (status, 1, 2, 0)])
        {
            let words = [to as u32, 0, len, flags | next << 16];
            words.iter().zip(0..).for_each(|(word, part)| memory.poke(base + at * 16 + part * 4, *word));
        }
        let used = memory.peek(base + 0x2000) >> 16;
        let index = (memory.peek(base + 0x1000) >> 16) + 1;
        memory.poke(base + 0x1004, 0);
        memory.poke(base + 0x1008, 0);
        memory.poke(base + 0x1000, index << 16);
        self.set(window + 0x50, 0);
        until("the disk answers", || memory.peek(base + 0x2000) >> 16 != used);
        memory.peek(status) as u8
    }

    fn write(&self, window: u64, sector: u32, value: u32) -> u8 {
        self.0.poke(area(window) + DATA, value);
        self.request(window, true, sector)
    }

    fn read(&self, window: u64, sector: u32) -> u32 {
        self.0.poke(area(window) + DATA, 0xdead_beef);
        assert_eq!(self.request(window, false, sector), 0);
        self.0.peek(area(window) + DATA)
    }
}

/// A raw file with its mark in each sector.
fn bottom(host: &TestHost, whose: u32) -> PathBuf {
    let path = host.path("disk");
    let file = File::create(&path).unwrap();
    file.set_len(DISK).unwrap();
    file.write_all_at(&whose.to_le_bytes(), 7 * 512).unwrap();
    path
}

const DATA_DISK: u64 = further(0);
const SOURCE: u64 = further(1);
const SECOND: u64 = further(2);

fn boot(host: &mut TestHost) -> Monitor {
    host.disks = vec![(bottom(host, 1), false), (bottom(host, 2), true), (bottom(host, 3), false)];
    let machine = host.boot(PUPPET);
    let driver = Driver(&machine);
    for (window, read_only) in [(ROOT, false), (DATA_DISK, false), (SOURCE, true), (SECOND, false)] {
        let (bytes, features) = driver.look(window);
        assert_eq!((bytes, features & READ_ONLY != 0), (DISK, read_only), "{window:#x}");
        driver.start(window);
    }
    machine
}

#[test]
fn every_disk_is_one_of_its_own() {
    let Some(mut host) = host() else { return };
    let machine = boot(&mut host);
    let driver = Driver(&machine);
    assert_eq!([DATA_DISK, SOURCE, SECOND].map(|window| driver.read(window, 7)), [1, 2, 3]);
    for (window, value) in [(ROOT, 10), (DATA_DISK, 11), (SECOND, 13)] {
        assert_eq!(driver.write(window, 9, value), 0);
    }
    assert_eq!(driver.write(SOURCE, 9, 12), 1, "a disk that is only read was written");
    let all = [ROOT, DATA_DISK, SOURCE, SECOND];
    assert_eq!(all.map(|window| driver.read(window, 9)), [10, 11, 0, 13]);
    // No device follows them: ones, as on a bus.
    assert_eq!(driver.get(further(3)), u32::MAX);
}

/// All disks are of one instant, and each copy has its own from then on.
#[test]
fn disks_are_frozen_together() {
    let Some(mut host) = host() else { return };
    let mut machine = boot(&mut host);
    let disks = [ROOT, DATA_DISK, SECOND];
    let write = |machine: &Monitor, value: u32| {
        for (window, nth) in disks.iter().zip(0..) {
            assert_eq!(Driver(machine).write(*window, 9, value + nth), 0);
        }
    };
    let read = |machine: &Monitor| disks.map(|window| Driver(machine).read(window, 9));
    write(&machine, 10);
    let (mut zygote, _) = host.freeze(&mut machine);
    write(&machine, 20);
    let (a, mut b) = (host.thaw(&mut zygote), host.thaw(&mut zygote));
    assert_eq!((read(&a), read(&b)), ([10, 11, 12], [10, 11, 12]));
    write(&a, 30);
    write(&b, 40);
    assert_eq!([read(&machine), read(&a), read(&b)], [[20, 21, 22], [30, 31, 32], [40, 41, 42]]);
    assert_eq!(Driver(&a).read(SOURCE, 7), 2);
    // Through files, and once more through a freeze.
    let (mut zygote, _) = host.freeze(&mut b);
    b.kill();
    let (stored, _) = host.persist(&mut zygote, None);
    let mut loaded = host.load(&stored);
    loaded.files.as_mut().unwrap().disks = zygote.files.as_ref().unwrap().disks.clone();
    let again = host.thaw(&mut loaded);
    assert_eq!((read(&again), Driver(&again).read(SOURCE, 7)), ([40, 41, 42], 2));
    // A machine with other disks than its state says does not start.
    host.disks.pop();
    let error = host.try_thaw(&mut loaded).err().expect("it was taken").to_string();
    assert_eq!(error, "Thaw needs a descriptor for a layer of additional disk 2, and has none");
}

#[test]
fn a_chain_of_a_further_disk_is_shortened_alone() {
    let Some(mut host) = host() else { return };
    let mut machine = boot(&mut host);
    let (zygote, _) = host.freeze(&mut machine);
    zygote.close();
    // In a different cluster than the mark of the bottom.
    assert_eq!(Driver(&machine).write(DATA_DISK, 1000, 5), 0);
    let flat = bottom(&host, 77);
    let fds = [(Role::DiskLayer(0), File::open(&flat).unwrap().into())];
    let reply = machine.client.call(&Request::Layers, &borrow(&fds), monitor::PATIENCE).unwrap().reply;
    assert_eq!(reply, Reply::Done);
    let driver = Driver(&machine);
    assert_eq!((driver.read(DATA_DISK, 7), driver.read(DATA_DISK, 1000), driver.read(SECOND, 7)), (77, 5, 3));
    let fds = [(Role::DiskLayer(3), File::open(&flat).unwrap().into())];
    let error = machine.client.call(&Request::Layers, &borrow(&fds), monitor::PATIENCE).unwrap_err();
    assert!(matches!(&error, ControlError::Failed { .. }), "{error}");
    assert!(error.to_string().contains("additional disk 3"), "{error}");
    let fds = [(Role::DiskLayer(1), File::open(&flat).unwrap().into())];
    let error = machine.client.call(&Request::Layers, &borrow(&fds), monitor::PATIENCE).unwrap_err();
    assert_eq!(error.to_string(), "a disk without a writable layer has no layer to switch to");
    machine.counts();
}

#[test]
fn more_disks_than_there_is_room_for_are_refused() {
    let Some(mut host) = host() else { return };
    host.disks = vec![(bottom(&host, 1), true); 8];
    let machine = host.boot(PUPPET);
    assert_eq!(Driver(&machine).look(further(7)), (DISK, Driver(&machine).look(further(0)).1));
    host.disks.push((bottom(&host, 1), true));
    let error = host.try_boot(PUPPET, 1, 16).err().expect("it was taken").to_string();
    assert_eq!(error, "Boot takes at most 0 descriptors for a layer of additional disk 8, and has 1");
    let disks = vec![keiki_control::Disk { read_only: true }; 9];
    let devices = keiki_control::Devices { mac: [2; 6], agent_port: "x".into(), disks };
    let error = keiki_vmm::device_manager::mmio_devices(&devices).unwrap_err().to_string();
    assert_eq!(error, "a machine has at most 8 disks besides its root disk, not 9");
}
