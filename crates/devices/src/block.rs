//! virtio-blk: a [`Disk`] for the guest.
//!
//! A chain is first parsed whole into a `Request`, with every number checked against the disk,
//! and then executed. Data moves between the file and guest memory without a copy of ours. A
//! request is done when its call on the event loop returns, so nothing is ever in flight and a
//! drain has nothing to wait for. A flush is acknowledged when [`Disk::flush`] returns.
//!
//! An invalid request (beyond the end, a write to a read-only disk, lengths that are not whole
//! sectors) gets an error status and has no effect.

use crate::{
    Memory, State, StateError,
    disk::{CLUSTER, Disk},
    virtio::{Chain, Fault, Rings, Served, VirtioDevice, slice, volatile},
};
use serde::{Deserialize, Serialize};
use std::io;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

const SECTOR: u64 = 512;
const QUEUE_SIZE: u16 = 256;
/// Data segments of a request: the size of the queue without header and status.
const SEG_MAX: u32 = 254;
/// Bytes of a segment.
const SIZE_MAX: u32 = 1 << 16;
/// The longest request of a driver.
const MAX_DATA: u64 = SEG_MAX as u64 * SIZE_MAX as u64;
const HEADER: u64 = 16;
/// Bytes of one range of a discard or a write of zeroes.
const RANGE: usize = 16;
const MAX_RANGES: u32 = 8;
/// Sectors of a range, 64 MiB. Bounds how much one request can grow the tables of a layer.
const MAX_RANGE_SECTORS: u32 = 1 << 17;
const ID_LEN: usize = 20;

const KIND: &str = "block";
const VERSION: u16 = 1;

#[derive(Debug)]
pub struct Block {
    disk: Disk,
    id: String,
    /// The driver does not flush: every write must be durable when it completes.
    write_through: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct BlockState {
    bytes: u64,
    read_only: bool,
}

/// A checked request of the guest: every range is within the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Request {
    Read { offset: u64, len: u64 },
    Write { offset: u64, len: u64 },
    Flush,
    Discard(Vec<Range>),
    WriteZeroes(Vec<Range>),
    Id,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    offset: u64,
    len: u64,
    unmap: bool,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refused {
    Invalid,
    Unsupported,
}

impl Block {
    /// The guest can read the first 20 bytes of `id`.
    pub fn new(disk: Disk, id: &str) -> Self {
        Self { disk, id: id.into(), write_through: false }
    }

    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// The disk, to flush it ahead and to change layers. It is consistent between two requests.
    pub fn disk_mut(&mut self) -> &mut Disk {
        &mut self.disk
    }

    fn parse(&self, memory: &Memory, chain: &Chain) -> Result<Request, Refused> {
        let mut header = [0; HEADER as usize];
        if chain.read(memory, 0, &mut header) < header.len() {
            return Err(Refused::Invalid);
        }
        let (kind, offset) = (le32(&header, 0), self.offset(le64(&header, 8)));
        // The last writable byte is the status.
        let (input, output) = (chain.writable_len() - 1, chain.readable_len() - HEADER);
        match kind {
            VIRTIO_BLK_T_IN => Ok(Request::Read { offset: self.span(offset, input)?, len: input }),
            VIRTIO_BLK_T_OUT if self.disk.is_read_only() => Err(Refused::Invalid),
            VIRTIO_BLK_T_OUT => Ok(Request::Write { offset: self.span(offset, output)?, len: output }),
            VIRTIO_BLK_T_FLUSH => Ok(Request::Flush),
            VIRTIO_BLK_T_GET_ID if input >= ID_LEN as u64 => Ok(Request::Id),
            VIRTIO_BLK_T_GET_ID => Err(Refused::Invalid),
            VIRTIO_BLK_T_DISCARD => Ok(Request::Discard(self.ranges(memory, chain, output)?)),
            VIRTIO_BLK_T_WRITE_ZEROES => Ok(Request::WriteZeroes(self.ranges(memory, chain, output)?)),
            _ => Err(Refused::Unsupported),
        }
    }

    fn offset(&self, sector: u64) -> Option<u64> {
        sector.checked_mul(SECTOR)
    }

    /// Checks that a read or write is whole sectors within the disk. Returns its offset.
    fn span(&self, offset: Option<u64>, len: u64) -> Result<u64, Refused> {
        let offset = offset.ok_or(Refused::Invalid)?;
        let end = offset.checked_add(len).ok_or(Refused::Invalid)?;
        let fits = end <= self.disk.bytes() && len <= MAX_DATA && len.is_multiple_of(SECTOR) && len > 0;
        if fits { Ok(offset) } else { Err(Refused::Invalid) }
    }

    fn ranges(&self, memory: &Memory, chain: &Chain, len: u64) -> Result<Vec<Range>, Refused> {
        if self.disk.is_read_only() {
            return Err(Refused::Invalid);
        }
        let count = usize::try_from(len).map_err(|_| Refused::Invalid)? / RANGE;
        if count == 0 || count > MAX_RANGES as usize || !len.is_multiple_of(RANGE as u64) {
            return Err(Refused::Invalid);
        }
        let mut ranges = Vec::with_capacity(count);
        for nth in 0..count {
            let mut bytes = [0; RANGE];
            if chain.read(memory, HEADER + (nth * RANGE) as u64, &mut bytes) < RANGE {
                return Err(Refused::Invalid);
            }
            let (sectors, flags) = (le32(&bytes, 8), le32(&bytes, 12));
            if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
                return Err(Refused::Unsupported);
            }
            let offset = self.offset(le64(&bytes, 0)).ok_or(Refused::Invalid)?;
            let len = u64::from(sectors) * SECTOR;
            let end = offset.checked_add(len).ok_or(Refused::Invalid)?;
            if sectors > MAX_RANGE_SECTORS || end > self.disk.bytes() {
                return Err(Refused::Invalid);
            }
            ranges.push(Range { offset, len, unmap: flags != 0 });
        }
        Ok(ranges)
    }

    /// Executes a request. Returns the number of bytes written to guest memory.
    fn execute(&mut self, memory: &Memory, chain: &Chain, request: Request) -> io::Result<u32> {
        match request {
            Request::Read { offset, len } => {
                let data = volatile(memory, slice(chain.writable(), 0, len)).map_err(io::Error::other)?;
                self.disk.read(&data, offset)?;
                // At most MAX_DATA.
                Ok(len as u32)
            }
            Request::Write { offset, len } => {
                let data =
                    volatile(memory, slice(chain.readable(), HEADER, len)).map_err(io::Error::other)?;
                self.disk.write(&data, offset)?;
                if self.write_through {
                    self.disk.flush()?;
                }
                Ok(0)
            }
            Request::Flush => self.disk.flush().map(|()| 0),
            Request::Discard(ranges) => {
                ranges.iter().try_for_each(|range| self.disk.discard(range.offset, range.len)).map(|()| 0)
            }
            Request::WriteZeroes(ranges) => ranges
                .iter()
                .filter(|range| range.len > 0)
                .try_for_each(|range| self.disk.write_zeroes(range.offset, range.len, range.unmap))
                .map(|()| 0),
            Request::Id => {
                let mut id = [0; ID_LEN];
                for (to, from) in id.iter_mut().zip(self.id.bytes()) {
                    *to = from;
                }
                Ok(chain.write(memory, 0, &id) as u32)
            }
        }
    }

    /// Serves a chain. Returns the number of bytes written, and an error of the host.
    fn serve(&mut self, memory: &Memory, chain: &Chain) -> (u32, Option<io::Error>) {
        let Some(status_at) = chain.writable_len().checked_sub(1) else { return (0, None) };
        let parsed = self.parse(memory, chain);
        let (status, written, error) = match parsed.map(|request| self.execute(memory, chain, request)) {
            Ok(Ok(written)) => (VIRTIO_BLK_S_OK, written, None),
            Ok(Err(error)) => (VIRTIO_BLK_S_IOERR, 0, Some(error)),
            Err(Refused::Invalid) => (VIRTIO_BLK_S_IOERR, 0, None),
            Err(Refused::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0, None),
        };
        let status = chain.write(memory, status_at, &[status as u8]) as u32;
        (written + status, error)
    }
}

impl VirtioDevice for Block {
    fn id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn features(&self) -> u64 {
        let always = 1 << VIRTIO_BLK_F_FLUSH
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_SIZE_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_TOPOLOGY;
        if self.disk.is_read_only() {
            always | 1 << VIRTIO_BLK_F_RO
        } else {
            always | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        }
    }

    fn queues(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    /// `struct virtio_blk_config`.
    fn config(&self) -> Vec<u8> {
        let mut config = Vec::with_capacity(60);
        config.extend((self.disk.bytes() / SECTOR).to_le_bytes());
        config.extend(SIZE_MAX.to_le_bytes());
        config.extend(SEG_MAX.to_le_bytes());
        config.extend([0; 4]);
        config.extend((SECTOR as u32).to_le_bytes());
        // 8 logical blocks per physical block, which is 4 KiB: guests then align their writes.
        config.extend([3, 0, 0, 0, 0, 0, 0, 0]);
        config.extend([0; 4]);
        let range: [u32; 3] = [MAX_RANGE_SECTORS, MAX_RANGES, (CLUSTER / SECTOR) as u32];
        config.extend(range.iter().chain(&range[..2]).flat_map(|number| number.to_le_bytes()));
        config.extend([1, 0, 0, 0]);
        config
    }

    fn activate(&mut self, features: u64) {
        self.write_through = features & 1 << VIRTIO_BLK_F_FLUSH == 0;
    }

    fn reset(&mut self) {}

    fn process_queue(&mut self, queue: usize, rings: &mut Rings) -> Result<(), Fault> {
        let mut failed = None;
        rings.serve(queue, |memory, chain| {
            let (written, error) = self.serve(memory, chain);
            failed = error.or(failed.take());
            Served::Done(written)
        })?;
        if let Some(error) = failed {
            rings.warn(format_args!("a request failed: {error}"));
        }
        Ok(())
    }

    fn save(&self) -> Result<State, StateError> {
        let state = BlockState { bytes: self.disk.bytes(), read_only: self.disk.is_read_only() };
        State::pack(KIND, VERSION, &state)
    }

    fn restore(&mut self, state: &State, features: u64) -> Result<(), StateError> {
        let state: BlockState = state.unpack(KIND, VERSION)?;
        let bad = |field, why| Err(StateError::Field { kind: KIND, field, why });
        if state.bytes != self.disk.bytes() {
            return bad("bytes", "is not the size of this disk");
        }
        if state.read_only != self.disk.is_read_only() {
            return bad("read_only", "differs from this disk");
        }
        self.activate(features);
        Ok(())
    }
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.iter().skip(at).take(4).rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from(le32(bytes, at)) | u64::from(le32(bytes, at + 4)) << 32
}
