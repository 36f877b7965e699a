//! What a virtio device is written against: its trait, its queues, and chains of guest memory that were checked.
//!
//! A [`Chain`] is a descriptor chain as a typed value: read once, bounded, every piece within RAM, what the device
//! reads before what it writes. A chain that is not like this never reaches a device: it is given back to the guest with
//! nothing written. A queue that is itself broken (an index out of range, a ring outside of RAM) is a [`Fault`]; the
//! transport then stops the device and tells the guest that it needs a reset, as the specification says.

use crate::{Event, Interrupt, Memory, State, StateError, limit::Limit, watch::Watcher};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use virtio_bindings::virtio_mmio::{VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INTERRUPT_STATUS};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, VolatileSlice};

pub use crate::watch::Interest;

/// Pieces that a chain may have.
pub const MAX_SEGMENTS: usize = 1024;
/// How long a queue is served at once, before others get their turn. What a request takes comes on top.
const TURN: Duration = Duration::from_millis(4);

/// Interrupt status: a queue was used.
pub(crate) const INT_USED: u32 = 1;
/// Interrupt status: the configuration changed, or the device needs a reset.
pub(crate) const INT_CONFIG: u32 = 2;

/// A virtio device, without its transport.
///
/// The transport calls in this order: `activate` when the driver is ready, then `process_queue` and `on_ready` in any
/// order, `reset` at any time, after which it is as new. `restore` comes before `start`, on a new device, and includes
/// what `activate` would have said. All calls are made by one thread at a time.
pub trait VirtioDevice: Send {
    fn id(&self) -> u32;

    /// A name for states and log lines.
    fn kind(&self) -> &'static str;

    /// Features it offers, besides those of the transport.
    fn features(&self) -> u64;

    fn queues(&self) -> &[u16];

    /// The configuration space as it is now. What lies beyond reads as zeroes.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// A write of the guest to the configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// The driver accepted these features (a subset of what was offered) and is ready.
    fn activate(&mut self, features: u64);

    /// The driver starts again from the beginning.
    fn reset(&mut self);

    /// The device may register what it waits for, with tokens of its own below 2^32. Once, after `restore`.
    fn start(&mut self, watcher: &Watcher, rings: &mut Rings) -> io::Result<()> {
        let _ = (watcher, rings);
        Ok(())
    }

    /// The guest notified a queue, or may have.
    fn process_queue(&mut self, queue: usize, rings: &mut Rings) -> Result<(), Fault>;

    /// What it registered under this token is ready.
    fn on_ready(&mut self, token: u64, rings: &mut Rings) -> Result<(), Fault> {
        let _ = (token, rings);
        Ok(())
    }

    /// Finishes what is in flight. All devices of ours finish each request before they return, so there is nothing.
    fn drain(&mut self, deadline: Instant) -> io::Result<()> {
        let _ = deadline;
        Ok(())
    }

    fn save(&self) -> Result<State, StateError>;

    /// Takes over a state, which is not trusted. `features`: what the driver accepted, checked already.
    fn restore(&mut self, state: &State, features: u64) -> Result<(), StateError>;
}

/// A queue that cannot be served any more.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Its rings make no sense.
    #[error("a queue is broken")]
    Ring(#[from] virtio_queue::Error),
    /// The backend is broken in a way that the guest has to be told of.
    #[error("the backend failed")]
    Backend(#[from] io::Error),
}

/// What became of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// Used, with so many bytes written from its beginning.
    Done(u32),
    /// Not now: it stays in the ring, and so do those behind it.
    Later,
}

/// A piece of guest memory, within RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub address: GuestAddress,
    /// Bytes. May be 0.
    pub len: u32,
}

/// A descriptor chain that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

/// A chain that the specification does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadChain {
    /// Loops, or is longer than its table, or ends in the middle.
    #[error("a descriptor chain does not end")]
    Endless,
    #[error("a descriptor chain has more than {MAX_SEGMENTS} pieces")]
    Long,
    /// A piece is not in RAM.
    #[error("a descriptor is outside of RAM")]
    Outside,
    /// Readable after writable.
    #[error("a descriptor to read follows one to write")]
    Order,
}

impl Chain {
    fn parse(
        memory: &Memory,
        chain: virtio_queue::DescriptorChain<&Memory>,
    ) -> (u16, Result<Self, BadChain>) {
        let head = chain.head_index();
        (head, Self::check(memory, head, chain))
    }

    fn check(
        memory: &Memory,
        head: u16,
        chain: virtio_queue::DescriptorChain<&Memory>,
    ) -> Result<Self, BadChain> {
        let mut parsed = Self { head, readable: Vec::new(), writable: Vec::new() };
        let mut ended = false;
        for descriptor in chain {
            if ended || parsed.readable.len() + parsed.writable.len() >= MAX_SEGMENTS {
                return Err(BadChain::Long);
            }
            ended = !descriptor.has_next();
            let segment = Segment { address: descriptor.addr(), len: descriptor.len() };
            if segment.len > 0 && !within(memory, segment) {
                return Err(BadChain::Outside);
            }
            if descriptor.is_write_only() {
                parsed.writable.push(segment);
            } else if parsed.writable.is_empty() {
                parsed.readable.push(segment);
            } else {
                return Err(BadChain::Order);
            }
        }
        // The iterator stops without a word where a chain loops or leaves its table.
        if ended { Ok(parsed) } else { Err(BadChain::Endless) }
    }

    /// What the device may read.
    pub fn readable(&self) -> &[Segment] {
        &self.readable
    }

    /// What the device may write.
    pub fn writable(&self) -> &[Segment] {
        &self.writable
    }

    /// Bytes that can be read. At most 4 GiB: the queue ends longer chains.
    pub fn readable_len(&self) -> u64 {
        total(&self.readable)
    }

    /// Bytes that can be written.
    pub fn writable_len(&self) -> u64 {
        total(&self.writable)
    }

    /// Copies what can be read from `offset` on into `into`. Number of bytes: less than asked for at the end.
    pub fn read(&self, memory: &Memory, offset: u64, into: &mut [u8]) -> usize {
        let mut done = 0;
        for part in slice(&self.readable, offset, into.len() as u64) {
            let Some(piece) = into.get_mut(done..done + part.len as usize) else { break };
            if memory.read_slice(piece, part.address).is_err() {
                break;
            }
            done += piece.len();
        }
        done
    }

    /// Copies `from` to what can be written, from `offset` on. Number of bytes: less than given at the end.
    pub fn write(&self, memory: &Memory, offset: u64, from: &[u8]) -> usize {
        let mut done = 0;
        for part in slice(&self.writable, offset, from.len() as u64) {
            let Some(piece) = from.get(done..done + part.len as usize) else { break };
            if memory.write_slice(piece, part.address).is_err() {
                break;
            }
            done += piece.len();
        }
        done
    }
}

/// The part of `segments` from `offset` on, `len` bytes at most.
pub fn slice(segments: &[Segment], offset: u64, len: u64) -> impl Iterator<Item = Segment> + '_ {
    let (mut skip, mut left) = (offset, len);
    segments.iter().filter_map(move |segment| {
        let start = skip.min(u64::from(segment.len));
        skip -= start;
        let take = left.min(u64::from(segment.len) - start);
        left -= take;
        let address = segment.address.checked_add(start)?;
        // Not more than the length it was cut from.
        (take > 0).then_some(Segment { address, len: take as u32 })
    })
}

/// Memory behind pieces, for I/O without a copy. A piece may cross regions.
pub fn volatile(
    memory: &Memory,
    segments: impl Iterator<Item = Segment>,
) -> Result<Vec<VolatileSlice<'_>>, vm_memory::GuestMemoryError> {
    let mut slices = Vec::new();
    for segment in segments {
        for part in GuestMemoryBackend::get_slices(memory, segment.address, segment.len as usize) {
            slices.push(part?);
        }
    }
    Ok(slices)
}

fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

fn usable(queues: &mut [Queue], live: bool, index: usize) -> Option<&mut Queue> {
    queues.get_mut(index).filter(|queue| live && queue.ready())
}

fn within(memory: &Memory, segment: Segment) -> bool {
    GuestMemoryBackend::check_range(memory, segment.address, segment.len as usize)
}

/// Why a device's interrupt is raised: the two registers that a driver's interrupt handler accesses, every time. They are
/// beside the device's lock, so that a vCPU in that handler never waits for I/O of the event loop.
#[derive(Debug, Default)]
pub struct InterruptStatus(AtomicU32);

impl InterruptStatus {
    /// Serves a read, if it is of the status register.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> bool {
        let mine = offset == u64::from(VIRTIO_MMIO_INTERRUPT_STATUS) && data.len() == 4;
        if mine {
            data.copy_from_slice(&self.get().to_le_bytes());
        }
        mine
    }

    /// Serves a write, if it is to the acknowledge register.
    pub fn write(&self, offset: u64, data: &[u8]) -> bool {
        match <[u8; 4]>::try_from(data) {
            Ok(bits) if offset == u64::from(VIRTIO_MMIO_INTERRUPT_ACK) => {
                self.0.fetch_and(!u32::from_le_bytes(bits), Ordering::SeqCst);
                true
            }
            _ => false,
        }
    }

    pub(crate) fn get(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn set(&self, status: u32) {
        self.0.store(status, Ordering::SeqCst);
    }
}

/// The interrupt of a device and why it is raised.
pub(crate) struct Line {
    interrupt: Box<dyn Interrupt>,
    pub(crate) status: Arc<InterruptStatus>,
    /// Counts changes of the configuration.
    pub(crate) generation: u32,
}

impl Line {
    pub(crate) fn new(interrupt: Box<dyn Interrupt>) -> Self {
        Self { interrupt, status: Arc::default(), generation: 0 }
    }

    pub(crate) fn raise(&mut self, why: u32) {
        self.status.0.fetch_or(why, Ordering::SeqCst);
        // The guest waits for nothing else: if the line is broken, so is the machine, and its monitor knows.
        let _ = self.interrupt.raise();
    }
}

/// The queues of one device, its interrupt, and the memory they are in.
pub struct Rings {
    pub(crate) memory: Memory,
    pub(crate) queues: Vec<Queue>,
    pub(crate) events: Vec<Event>,
    pub(crate) line: Line,
    pub(crate) limit: Limit,
    /// The driver is ready, and no queue is broken. Otherwise queues look empty.
    pub(crate) live: bool,
}

impl Rings {
    /// How many chains a queue can hold.
    pub fn size(&self, index: usize) -> u16 {
        self.queues.get(index).map_or(0, QueueT::size)
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Looks at this queue again soon.
    pub fn kick(&self, queue: usize) {
        if let Some(event) = self.events.get(queue) {
            // Nothing can be done about it; the guest's next notification is as good.
            let _ = event.signal();
        }
    }

    /// Tells the guest that the configuration changed.
    pub fn config_changed(&mut self) {
        self.line.generation = self.line.generation.wrapping_add(1);
        self.line.raise(INT_CONFIG);
    }

    /// A log line that the guest may cause.
    pub fn warn(&mut self, what: std::fmt::Arguments<'_>) {
        self.limit.warn(what);
    }

    /// Gives the chains of a queue to `handle`, until it is empty, `handle` says [`Served::Later`], or its turn is over;
    /// then the queue is kicked. The guest is told of what was used.
    pub fn serve(
        &mut self,
        index: usize,
        mut handle: impl FnMut(&Memory, &Chain) -> Served,
    ) -> Result<(), Fault> {
        let end = Instant::now() + TURN;
        let Some(queue) = usable(&mut self.queues, self.live, index) else { return Ok(()) };
        let mut used = false;
        'turn: loop {
            queue.disable_notification(&self.memory)?;
            while let Some(chain) = queue.iter(&self.memory)?.next() {
                let (head, chain) = Chain::parse(&self.memory, chain);
                let written = match chain.map(|chain| handle(&self.memory, &chain)) {
                    Ok(Served::Done(written)) => written,
                    Ok(Served::Later) => {
                        queue.go_to_previous_position();
                        break 'turn;
                    }
                    Err(why) => {
                        self.limit.warn(format_args!("{why}"));
                        0
                    }
                };
                queue.add_used(&self.memory, head, written)?;
                used = true;
                if Instant::now() >= end {
                    self.events.get(index).map(Event::signal);
                    break 'turn;
                }
            }
            if !queue.enable_notification(&self.memory)? {
                break;
            }
        }
        if used && queue.needs_notification(&self.memory)? {
            self.line.raise(INT_USED);
        }
        Ok(())
    }

    /// Takes the next chain, for devices that use several for one thing. It must be given to [`Rings::publish`] or
    /// [`Rings::untake`]. Notifications are on when there is none.
    pub fn take(&mut self, index: usize) -> Result<Option<Chain>, Fault> {
        // A driver that refills bad chains as fast as they are given back has its turn, and waits for the next.
        let mut turn = 0;
        loop {
            let Some(queue) = usable(&mut self.queues, self.live, index) else { return Ok(None) };
            if turn > queue.size() {
                self.events.get(index).map(Event::signal);
                return Ok(None);
            }
            turn += 1;
            let Some(chain) = queue.iter(&self.memory)?.next() else {
                if queue.enable_notification(&self.memory)? {
                    continue;
                }
                return Ok(None);
            };
            let (head, chain) = Chain::parse(&self.memory, chain);
            match chain {
                Ok(chain) => return Ok(Some(chain)),
                Err(why) => {
                    self.limit.warn(format_args!("{why}"));
                    queue.add_used(&self.memory, head, 0)?;
                }
            }
        }
    }

    /// Puts the `count` chains that were taken last back.
    pub fn untake(&mut self, index: usize, count: usize) {
        if let Some(queue) = self.queues.get_mut(index) {
            (0..count).for_each(|_| queue.go_to_previous_position());
        }
    }

    /// Uses chains, all in one step: the guest sees none of them or all.
    pub fn publish(&mut self, index: usize, used: &[(Chain, u32)]) -> Result<(), Fault> {
        let Some(queue) = usable(&mut self.queues, self.live, index) else { return Ok(()) };
        let Some(((last, last_len), rest)) = used.split_last() else { return Ok(()) };
        for (nth, (chain, len)) in (0_u16..).zip(rest) {
            let slot = u64::from(queue.next_used().wrapping_add(nth) % queue.size());
            let at =
                queue.used_ring().checked_add(4 + 8 * slot).ok_or(virtio_queue::Error::AddressOverflow)?;
            self.memory
                .write_obj((u64::from(chain.head) | u64::from(*len) << 32).to_le(), GuestAddress(at))
                .map_err(virtio_queue::Error::GuestMemory)?;
        }
        // Below the size of the queue.
        queue.set_next_used(queue.next_used().wrapping_add(rest.len() as u16));
        queue.add_used(&self.memory, last.head, *last_len)?;
        // The queue knows of the last only when it decides whether to notify.
        let notify = queue.needs_notification(&self.memory)? || !rest.is_empty();
        if notify {
            self.line.raise(INT_USED);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
