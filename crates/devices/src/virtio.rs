//! The interface for virtio devices: their trait, their queues, and checked chains of guest memory.
//!
//! A [`Chain`] is a descriptor chain as a typed value: read once, bounded, every segment within
//! RAM, readable segments before writable ones. Other chains never reach a device: the guest gets
//! them back with nothing written. A queue that is itself broken (an index out of range, a ring
//! outside RAM) is a [`Fault`]: the transport stops the device and tells the guest that it needs a
//! reset, as the specification demands.

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

/// Most segments of a chain.
pub const MAX_SEGMENTS: usize = 1024;
/// How long a queue is served before others are. The last request may take longer.
const BUDGET: Duration = Duration::from_millis(4);

/// Interrupt status: a queue was used.
pub(crate) const INT_USED: u32 = 1;
/// Interrupt status: the configuration changed, or the device needs a reset.
pub(crate) const INT_CONFIG: u32 = 2;

/// A virtio device, without its transport.
///
/// The transport calls `activate` when the driver is ready, then `process_queue` and `on_ready` in
/// any order, and `reset` at any time, after which the device is like new. `restore` comes before
/// `start`, on a new device, and replaces `activate`. Only one thread calls at a time.
pub trait VirtioDevice: Send {
    fn id(&self) -> u32;

    /// Name in states and log lines.
    fn kind(&self) -> &'static str;

    /// Offered features, besides those of the transport.
    fn features(&self) -> u64;

    fn queues(&self) -> &[u16];

    /// The configuration space. Addresses beyond it read as zeroes.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// The guest writes to the configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// The driver is ready and has accepted these features, a subset of the offered ones.
    fn activate(&mut self, features: u64);

    /// The driver starts again.
    fn reset(&mut self);

    /// Registers what the device waits for, with tokens below 2^32. Called once, after `restore`.
    fn start(&mut self, watcher: &Watcher, rings: &mut Rings) -> io::Result<()> {
        let _ = (watcher, rings);
        Ok(())
    }

    /// The guest has notified a queue, or may have.
    fn process_queue(&mut self, queue: usize, rings: &mut Rings) -> Result<(), Fault>;

    /// The descriptor registered under this token is ready.
    fn on_ready(&mut self, token: u64, rings: &mut Rings) -> Result<(), Fault> {
        let _ = (token, rings);
        Ok(())
    }

    /// Finishes what is in flight. The default does nothing: our devices finish each request before
    /// they return.
    fn drain(&mut self, deadline: Instant) -> io::Result<()> {
        let _ = deadline;
        Ok(())
    }

    fn save(&self) -> Result<State, StateError>;

    /// Restores a state, which is not trusted. `features` are those that the driver has accepted,
    /// already checked.
    fn restore(&mut self, state: &State, features: u64) -> Result<(), StateError>;
}

/// Why a device cannot serve its queues any more.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("a queue is broken")]
    Ring(#[from] virtio_queue::Error),
    /// The backend is broken and the guest must reset the device.
    #[error("the backend failed")]
    Backend(#[from] io::Error),
}

/// What a device did with a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// Used, with this number of bytes written from its start.
    Done(u32),
    /// Not now. It stays in the ring, and so do the chains after it.
    Later,
}

/// A segment of guest memory, within RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub address: GuestAddress,
    /// May be 0.
    pub len: u32,
}

/// A checked descriptor chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    head: u16,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

/// A chain that the specification does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadChain {
    /// The chain loops, leaves its table, or ends in the middle.
    #[error("a descriptor chain does not end")]
    Endless,
    #[error("a descriptor chain has more than {MAX_SEGMENTS} segments")]
    Long,
    #[error("a descriptor is outside RAM")]
    Outside,
    #[error("a readable descriptor follows a writable one")]
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
        // The iterator stops silently where a chain loops or leaves its table.
        if ended { Ok(parsed) } else { Err(BadChain::Endless) }
    }

    pub fn readable(&self) -> &[Segment] {
        &self.readable
    }

    pub fn writable(&self) -> &[Segment] {
        &self.writable
    }

    /// At most 4 GiB: the queue cuts longer chains.
    pub fn readable_len(&self) -> u64 {
        total(&self.readable)
    }

    pub fn writable_len(&self) -> u64 {
        total(&self.writable)
    }

    /// Copies readable bytes from `offset` on into `into`. Returns their number, which is smaller
    /// at the end of the chain.
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

    /// Copies `from` to the writable bytes from `offset` on. Returns their number, which is smaller
    /// at the end of the chain.
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
        // At most the length of the segment.
        (take > 0).then_some(Segment { address, len: take as u32 })
    })
}

/// The memory of segments, for I/O without a copy. A segment may cross regions.
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

/// Why an interrupt is raised: the two registers that the interrupt handler of a driver uses every
/// time. They need no lock of the device, so a vCPU in that handler never waits for I/O of the
/// event loop.
#[derive(Debug, Default)]
pub struct InterruptStatus(AtomicU32);

impl InterruptStatus {
    /// Serves a read of the status register. False for other registers.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> bool {
        let mine = offset == u64::from(VIRTIO_MMIO_INTERRUPT_STATUS) && data.len() == 4;
        if mine {
            data.copy_from_slice(&self.get().to_le_bytes());
        }
        mine
    }

    /// Serves a write to the acknowledge register. False for other registers.
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

/// The interrupt of a device and its status.
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
        // An error means that the machine itself is broken, which the monitor notices.
        let _ = self.interrupt.raise();
    }
}

/// The queues of one device, their memory and the interrupt.
pub struct Rings {
    pub(crate) memory: Memory,
    pub(crate) queues: Vec<Queue>,
    pub(crate) events: Vec<Event>,
    pub(crate) line: Line,
    pub(crate) limit: Limit,
    /// The driver is ready and no queue is broken. Otherwise all queues look empty.
    pub(crate) live: bool,
}

impl Rings {
    /// Number of chains that a queue can hold.
    pub fn size(&self, index: usize) -> u16 {
        self.queues.get(index).map_or(0, QueueT::size)
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Makes the event loop look at this queue again.
    pub fn kick(&self, queue: usize) {
        if let Some(event) = self.events.get(queue) {
            // On error the next notification of the guest does the same.
            let _ = event.signal();
        }
    }

    /// Notifies the guest that the configuration has changed.
    pub fn config_changed(&mut self) {
        self.line.generation = self.line.generation.wrapping_add(1);
        self.line.raise(INT_CONFIG);
    }

    /// Logs a line that the guest can cause, within a limit.
    pub fn warn(&mut self, what: std::fmt::Arguments<'_>) {
        self.limit.warn(what);
    }

    /// Passes the chains of a queue to `handle` until the queue is empty, `handle` returns
    /// [`Served::Later`], or `BUDGET` is over. In the last case the queue is kicked. Notifies the
    /// guest of used chains.
    pub fn serve(
        &mut self,
        index: usize,
        mut handle: impl FnMut(&Memory, &Chain) -> Served,
    ) -> Result<(), Fault> {
        let end = Instant::now() + BUDGET;
        let Some(queue) = usable(&mut self.queues, self.live, index) else { return Ok(()) };
        let mut used = false;
        'serve: loop {
            queue.disable_notification(&self.memory)?;
            while let Some(chain) = queue.iter(&self.memory)?.next() {
                let (head, chain) = Chain::parse(&self.memory, chain);
                let written = match chain.map(|chain| handle(&self.memory, &chain)) {
                    Ok(Served::Done(written)) => written,
                    Ok(Served::Later) => {
                        queue.go_to_previous_position();
                        break 'serve;
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
                    break 'serve;
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

    /// Takes the next chain, for devices that use several at once. Each must be passed to
    /// [`Rings::publish`] or returned by [`Rings::untake`]. Without a chain, notifications are on.
    pub fn take(&mut self, index: usize) -> Result<Option<Chain>, Fault> {
        // Bounds a driver that refills bad chains as fast as it gets them back.
        let mut taken = 0;
        loop {
            let Some(queue) = usable(&mut self.queues, self.live, index) else { return Ok(None) };
            if taken > queue.size() {
                self.events.get(index).map(Event::signal);
                return Ok(None);
            }
            taken += 1;
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

    /// Returns the last `count` taken chains to the queue.
    pub fn untake(&mut self, index: usize, count: usize) {
        if let Some(queue) = self.queues.get_mut(index) {
            (0..count).for_each(|_| queue.go_to_previous_position());
        }
    }

    /// Uses chains in one step: the guest sees all of them or none.
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
        // The count is below the size of the queue.
        queue.set_next_used(queue.next_used().wrapping_add(rest.len() as u16));
        queue.add_used(&self.memory, last.head, *last_len)?;
        // The queue considers only the last chain when it decides whether to notify.
        let notify = queue.needs_notification(&self.memory)? || !rest.is_empty();
        if notify {
            self.line.raise(INT_USED);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
