//! virtio-balloon: memory that the guest does not use goes back to the host.
//!
//! Two ways: the guest reports ranges that are free (free page reporting), by itself and all the time; or the host sets a
//! target and the guest gives pages up until it is told otherwise (inflate). How memory is given back is the monitor's
//! ([`Discard`]): over a private mapping of a file, `MADV_DONTNEED` would show the file again.

use crate::{
    Memory, State, StateError,
    virtio::{Chain, Fault, Rings, Served, VirtioDevice},
};
use serde::{Deserialize, Serialize};
use std::io;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend};

/// What gives memory back.
pub trait Discard: Send {
    /// Gives back what it can of this range, which is whole pages within RAM. What it gives back reads as zeroes then.
    fn discard(&self, start: GuestAddress, bytes: u64) -> io::Result<()>;
}

/// Features of `linux/virtio_balloon.h`.
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_REPORTING: u64 = 1 << 5;

const PAGE: u64 = 4096;
const QUEUE_SIZE: u16 = 128;
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
/// Queues are numbered without those that were not agreed on: this is 2 only because there are no statistics.
const REPORT: usize = 2;
/// Page numbers of one request: what Linux sends, and a few times that.
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

    /// What the guest says it gave up.
    pub fn actual_pages(&self) -> u32 {
        self.actual_pages
    }

    /// Discards the pages that a chain lists by number, those that follow each other at once.
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

    /// Discards the whole pages within a range, if it is within RAM.
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
                // What is taken back is there already: it reads as zeroes.
                DEFLATE => Ok(()),
                _ => Ok(()),
            };
            if done.is_err() {
                result = done;
            }
            Served::Done(0)
        })?;
        if let Err(error) = result {
            // The memory stays where it is.
            rings.warn(format_args!("memory cannot be given back: {error}"));
        }
        Ok(())
    }

    fn save(&self) -> Result<State, StateError> {
        let state = BalloonState { target_pages: self.target_pages, actual_pages: self.actual_pages };
        State::pack(KIND, VERSION, &state)
    }

    fn restore(&mut self, state: &State, features: u64) -> Result<(), StateError> {
        let state: BalloonState = state.unpack(KIND, VERSION)?;
        // Both are numbers that the guest and its owner choose: nothing is done with them but telling each other.
        (self.target_pages, self.actual_pages) = (state.target_pages, state.actual_pages);
        self.activate(features);
        Ok(())
    }
}
