//! A driver: what a guest does to a virtio device, over real registers and real rings in real guest
//! memory.
#![allow(dead_code)]

use keiki_devices::{
    Device, Interrupt, Memory, State, StateError,
    mmio::{Mmio, NOTIFY},
    virtio::VirtioDevice,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use vm_memory::{Bytes, GuestAddress};

/// RAM of the test machine: two regions, with a hole between them, and one above 4 GiB.
pub const LOW: (u64, usize) = (0, 24 << 20);
pub const MIDDLE: (u64, usize) = (32 << 20, 8 << 20);
pub const HIGH: (u64, usize) = (4 << 30, 8 << 20);

pub const STATUS: u64 = 0x70;
pub const INTERRUPT_STATUS: u64 = 0x60;
pub const INTERRUPT_ACK: u64 = 0x64;
pub const QUEUE_SEL: u64 = 0x30;
pub const QUEUE_NUM_MAX: u64 = 0x34;
pub const QUEUE_NUM: u64 = 0x38;
pub const QUEUE_READY: u64 = 0x44;
pub const DEVICE_FEATURES: u64 = 0x10;
pub const DEVICE_FEATURES_SEL: u64 = 0x14;
pub const DRIVER_FEATURES: u64 = 0x20;
pub const DRIVER_FEATURES_SEL: u64 = 0x24;
pub const QUEUE_DESC: u64 = 0x80;
pub const QUEUE_AVAIL: u64 = 0x90;
pub const QUEUE_USED: u64 = 0xa0;
pub const CONFIG: u64 = 0x100;

pub const VERSION_1: u64 = 1 << 32;
pub const EVENT_IDX: u64 = 1 << 29;
pub const NEEDS_RESET: u32 = 64;
pub const RUNNING: u32 = 15;

const QUEUES: u64 = 0x1_0000;
const QUEUE_SPACE: u64 = 0x1_0000;
const DATA: u64 = 2 << 20;

/// Counts its edges.
#[derive(Debug, Default)]
pub struct Line(pub AtomicU64);

impl Interrupt for Line {
    fn raise(&self) -> io::Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A piece of a chain.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    pub at: u64,
    pub len: u32,
    pub write: bool,
}

pub fn out(at: u64, len: u32) -> Piece {
    Piece { at, len, write: false }
}

pub fn into(at: u64, len: u32) -> Piece {
    Piece { at, len, write: true }
}

#[derive(Debug, Clone, Copy, Default)]
struct Ring {
    size: u16,
    next: u16,
    avail: u16,
    used: u16,
}

pub struct Driver<D> {
    pub mmio: Mmio<D>,
    pub memory: Memory,
    pub line: Arc<Line>,
    rings: [Ring; 4],
    data: u64,
}

pub fn memory() -> Memory {
    let ranges = [LOW, MIDDLE, HIGH].map(|(start, len)| (GuestAddress(start), len));
    Memory::from_ranges(&ranges).unwrap()
}

/// A deadline for a pause.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

impl<D: VirtioDevice> Driver<D> {
    /// A device that runs, with a driver that accepted everything.
    pub fn new(device: D) -> Self {
        let mut driver = Self::bare(device, memory());
        driver.mmio.resume().unwrap();
        let features = driver.offered();
        driver.negotiate(features);
        driver
    }

    /// A device that nobody did anything to.
    pub fn bare(device: D, memory: Memory) -> Self {
        let line = Arc::new(Line::default());
        let mmio = Mmio::new(device, memory.clone(), Box::new(Arc::clone(&line))).unwrap();
        Self { mmio, memory, line, rings: Default::default(), data: DATA }
    }

    /// The same guest on another device: what a thaw does.
    pub fn thawed(&self, device: D, state: &State) -> Result<Self, StateError> {
        let mut driver = Self::bare(device, self.memory.clone());
        driver.mmio.restore(state)?;
        driver.rings = self.rings;
        driver.data = self.data;
        driver.mmio.resume().unwrap();
        Ok(driver)
    }

    pub fn frozen(&mut self) -> State {
        self.mmio.pause(soon()).unwrap();
        let state = self.mmio.save().unwrap();
        assert_eq!(self.mmio.save().unwrap(), state, "saving changes nothing");
        self.mmio.resume().unwrap();
        state
    }

    pub fn offered(&mut self) -> u64 {
        self.set(DEVICE_FEATURES_SEL, 0);
        let low = u64::from(self.get(DEVICE_FEATURES));
        self.set(DEVICE_FEATURES_SEL, 1);
        low | u64::from(self.get(DEVICE_FEATURES)) << 32
    }

    /// From reset to running.
    pub fn negotiate(&mut self, features: u64) {
        self.set(STATUS, 0);
        self.set(STATUS, 1);
        self.set(STATUS, 3);
        self.accept(features);
        self.set(STATUS, 11);
        assert_eq!(self.get(STATUS), 11, "features are accepted");
        self.rings = Default::default();
        for queue in 0..4 {
            self.set(QUEUE_SEL, queue);
            let max = self.get(QUEUE_NUM_MAX);
            if max > 0 {
                self.set_up(queue, max as u16);
            }
        }
        self.set(STATUS, RUNNING);
        assert_eq!(self.get(STATUS), RUNNING);
    }

    pub fn accept(&mut self, features: u64) {
        self.set(DRIVER_FEATURES_SEL, 0);
        self.set(DRIVER_FEATURES, features as u32);
        self.set(DRIVER_FEATURES_SEL, 1);
        self.set(DRIVER_FEATURES, (features >> 32) as u32);
    }

    pub fn set_up(&mut self, queue: u32, size: u16) {
        let base = queue_base(queue as usize);
        self.set(QUEUE_SEL, queue);
        self.set(QUEUE_NUM, size.into());
        for (register, at) in [(QUEUE_DESC, base), (QUEUE_AVAIL, base + 0x4000), (QUEUE_USED, base + 0x6000)]
        {
            self.set(register, at as u32);
            self.set(register + 4, (at >> 32) as u32);
        }
        self.memory.write_slice(&[0; QUEUE_SPACE as usize], GuestAddress(base)).unwrap();
        self.set(QUEUE_READY, 1);
        assert_eq!(self.get(QUEUE_READY), 1, "queue {queue} is accepted");
        self.rings[queue as usize] = Ring { size, ..Ring::default() };
    }

    pub fn get(&mut self, register: u64) -> u32 {
        let mut value = [0; 4];
        self.mmio.read(register, &mut value);
        u32::from_le_bytes(value)
    }

    pub fn set(&mut self, register: u64, value: u32) {
        self.mmio.write(register, &value.to_le_bytes());
    }

    /// Room for data.
    pub fn room(&mut self, len: usize) -> u64 {
        if self.data + len as u64 > LOW.1 as u64 {
            self.data = DATA;
        }
        let at = self.data;
        self.data += (len as u64).next_multiple_of(64);
        at
    }

    /// Data to be sent.
    pub fn data(&mut self, bytes: &[u8]) -> Piece {
        let at = self.room(bytes.len());
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        out(at, bytes.len() as u32)
    }

    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    /// Writes a descriptor as it is.
    pub fn descriptor(&self, queue: usize, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        write_descriptor(&self.memory, queue_base(queue) + 16 * u64::from(index), at, len, flags, next);
    }

    /// Makes the chain that begins at `head` available.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let ring = &mut self.rings[queue];
        let at = queue_base(queue) + 0x4000;
        self.memory.write_obj(head, GuestAddress(at + 4 + 2 * u64::from(ring.avail % ring.size))).unwrap();
        ring.avail = ring.avail.wrapping_add(1);
        self.memory.write_obj(ring.avail, GuestAddress(at + 2)).unwrap();
    }

    /// As [`Driver::offer`], also where there is no such queue.
    pub fn offer_any(&mut self, queue: usize, head: u16) {
        if self.rings[queue].size > 0 {
            self.offer(queue, head);
        }
    }

    /// Lets the event loop run for some turns: a guest can keep it busy for ever.
    pub fn run_some(&mut self) {
        for _ in 0..200 {
            if !self.is_ready(Duration::ZERO) {
                return;
            }
            self.mmio.process();
        }
    }

    /// Sets the index of the ring to whatever.
    pub fn set_avail_index(&self, queue: usize, index: u16) {
        self.memory.write_obj(index, GuestAddress(queue_base(queue) + 0x4002)).unwrap();
    }

    /// A well-formed chain. Its head.
    pub fn add(&mut self, queue: usize, pieces: &[Piece]) -> u16 {
        let size = self.rings[queue].size;
        let head = self.rings[queue].next;
        let mut index = head;
        for (nth, piece) in pieces.iter().enumerate() {
            let more = nth + 1 < pieces.len();
            let next = (index + 1) % size;
            let flags = u16::from(more) | u16::from(piece.write) << 1;
            self.descriptor(queue, index, piece.at, piece.len, flags, next);
            index = next;
        }
        self.rings[queue].next = index;
        self.offer(queue, head);
        head
    }

    pub fn notify(&mut self, queue: u32) {
        self.set(NOTIFY, queue);
    }

    /// Lets the event loop run until there is nothing to do.
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.is_ready(Duration::ZERO) {
                return;
            }
            self.mmio.process();
        }
        panic!("the device never comes to rest");
    }

    /// Lets the event loop run until `done`.
    pub fn run_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < end, "it never happened");
            if self.is_ready(Duration::from_millis(5)) {
                self.mmio.process();
            }
        }
    }

    pub fn is_ready(&self, wait: Duration) -> bool {
        let fd = self.mmio.events().unwrap();
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        poll(&mut polled, Some(&wait)).unwrap() > 0
    }

    /// The next chain that was used.
    pub fn used(&mut self, queue: usize) -> Option<(u16, u32)> {
        let at = queue_base(queue) + 0x6000;
        let index: u16 = self.memory.read_obj(GuestAddress(at + 2)).unwrap();
        let ring = &mut self.rings[queue];
        if ring.used == index {
            return None;
        }
        let entry = GuestAddress(at + 4 + 8 * u64::from(ring.used % ring.size));
        let [id, len]: [u32; 2] = self.memory.read_obj(entry).unwrap();
        ring.used = ring.used.wrapping_add(1);
        // With EVENT_IDX: tell of the next one, too.
        let event = queue_base(queue) + 0x4000 + 4 + 2 * u64::from(ring.size);
        let used = ring.used;
        self.memory.write_obj(used, GuestAddress(event)).unwrap();
        Some((id as u16, len))
    }

    /// Adds a chain, notifies, and waits for it. Bytes written.
    pub fn request(&mut self, queue: usize, pieces: &[Piece]) -> u32 {
        let head = self.add(queue, pieces);
        self.notify(queue as u32);
        self.run();
        let (id, len) = self.used(queue).expect("the request is done");
        assert_eq!(id, head);
        len
    }

    pub fn interrupts(&self) -> u64 {
        self.line.0.load(Ordering::SeqCst)
    }
}

pub fn queue_base(queue: usize) -> u64 {
    QUEUES + queue as u64 * QUEUE_SPACE
}

pub fn write_descriptor(memory: &Memory, table: u64, at: u64, len: u32, flags: u16, next: u16) {
    memory.write_obj(at, GuestAddress(table)).unwrap();
    memory.write_obj(len, GuestAddress(table + 8)).unwrap();
    memory.write_obj(flags, GuestAddress(table + 12)).unwrap();
    memory.write_obj(next, GuestAddress(table + 14)).unwrap();
}
