//! virtio-balloon: returns unused memory of the guest to the host.
//!
//! The guest reports free ranges all the time (free page reporting). It may also give up pages
//! (inflate), but nothing here sets a target for that. The monitor decides how to free memory
//! ([`Discard`]): over a private mapping of a file, `MADV_DONTNEED` would show the file again.

use crate::{
    Memory, State, StateError,
    virtio::{Chain, Fault, Rings, Served, VirtioDevice},
};
use serde::{Deserialize, Serialize};
use std::io;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend};

/// Frees guest memory.
pub trait Discard: Send {
    /// Frees what it can of this range of whole pages within RAM. Freed memory reads as zeroes.
    fn discard(&self, start: GuestAddress, bytes: u64) -> io::Result<()>;
}

/// Features of `linux/virtio_balloon.h`.
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_REPORTING: u64 = 1 << 5;

const PAGE: u64 = 4096;
const QUEUE_SIZE: u16 = 128;
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
/// Queues of features that were not negotiated have no number: this is 2 only because there are no
/// statistics.
const REPORT: usize = 2;
/// Most page numbers of one request: a few times what Linux sends.
const MAX_PAGES: u64 = 1024;

const KIND: &str = "balloon";
const VERSION: u16 = 1;

pub struct Balloon {
    discard: Box<dyn Discard>,
    target_pages: u32,
    actual_pages: u32,
    reporting: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct BalloonState {
    target_pages: u32,
    actual_pages: u32,
}

impl Balloon {
    pub fn new(discard: Box<dyn Discard>) -> Self {
        Self { discard, target_pages: 0, actual_pages: 0, reporting: false }
    }

    /// Pages that the guest says it has given up.
    pub fn actual_pages(&self) -> u32 {
        self.actual_pages
    }

    /// Discards the pages whose numbers a chain lists. Adjacent pages are discarded at once.
    fn inflate(&self, memory: &Memory, chain: &Chain) -> io::Result<()> {
        let count = (chain.readable_len() / 4).min(MAX_PAGES);
        let mut run: Option<(u64, u64)> = None;
        let mut done = Ok(());
        for nth in 0..count {
            let mut number = [0; 4];
            if chain.read(memory, nth * 4, &mut number) < number.len() {
                break;
            }
            let page = u64::from(u32::from_le_bytes(number)) * PAGE;
            run = match run {
                Some((start, len)) if start + len == page => Some((start, len + PAGE)),
                Some((start, len)) => {
                    done = done.and(self.give_back(memory, GuestAddress(start), len));
                    Some((page, PAGE))
                }
                None => Some((page, PAGE)),
            };
        }
        match run {
            Some((start, len)) => done.and(self.give_back(memory, GuestAddress(start), len)),
            None => done,
        }
    }

    /// Discards the whole pages of a range, if it is within RAM.
    fn give_back(&self, memory: &Memory, start: GuestAddress, len: u64) -> io::Result<()> {
        let Some(end) = start.checked_add(len) else { return Ok(()) };
        let (first, end) =
            (start.raw_value().div_ceil(PAGE).saturating_mul(PAGE), end.raw_value() / PAGE * PAGE);
        let Some(bytes) = end.checked_sub(first).filter(|&bytes| bytes > 0) else { return Ok(()) };
        let within = usize::try_from(bytes)
            .is_ok_and(|bytes| GuestMemoryBackend::check_range(memory, GuestAddress(first), bytes));
        if within { self.discard.discard(GuestAddress(first), bytes) } else { Ok(()) }
    }

    fn report(&self, memory: &Memory, chain: &Chain) -> io::Result<()> {
        chain.writable().iter().try_for_each(|piece| self.give_back(memory, piece.address, piece.len.into()))
    }
}

impl VirtioDevice for Balloon {
    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn features(&self) -> u64 {
        F_DEFLATE_ON_OOM | F_REPORTING
    }

    fn queues(&self) -> &[u16] {
        &[QUEUE_SIZE; 3]
    }

    /// `struct virtio_balloon_config`.
    fn config(&self) -> Vec<u8> {
        [self.target_pages, self.actual_pages].iter().flat_map(|pages| pages.to_le_bytes()).collect()
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (4, Ok(pages)) = (offset, <[u8; 4]>::try_from(data)) {
            self.actual_pages = u32::from_le_bytes(pages);
        }
    }

    fn activate(&mut self, features: u64) {
        self.reporting = features & F_REPORTING != 0;
    }

    fn reset(&mut self) {
        (self.actual_pages, self.reporting) = (0, false);
    }

    fn process_queue(&mut self, queue: usize, rings: &mut Rings) -> Result<(), Fault> {
        let mut result = Ok(());
        let reporting = self.reporting;
        rings.serve(queue, |memory, chain| {
            let done = match queue {
                INFLATE => self.inflate(memory, chain),
                REPORT if reporting => self.report(memory, chain),
                // Pages that the guest takes back are there already: they read as zeroes.
                DEFLATE => Ok(()),
                _ => Ok(()),
            };
            if done.is_err() {
                result = done;
            }
            Served::Done(0)
        })?;
        if let Err(error) = result {
            // The guest need not know: the memory is merely not freed.
            rings.warn(format_args!("memory cannot be freed: {error}"));
        }
        Ok(())
    }

    fn save(&self) -> Result<State, StateError> {
        let state = BalloonState { target_pages: self.target_pages, actual_pages: self.actual_pages };
        State::pack(KIND, VERSION, &state)
    }

    fn restore(&mut self, state: &State, features: u64) -> Result<(), StateError> {
        let state: BalloonState = state.unpack(KIND, VERSION)?;
        // Both numbers are only shown to the guest, so any value is safe.
        (self.target_pages, self.actual_pages) = (state.target_pages, state.actual_pages);
        self.activate(features);
        Ok(())
    }
}
