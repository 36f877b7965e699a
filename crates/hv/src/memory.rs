//! Guest RAM: private mappings, anonymous or of a file that is never written.
//!
//! ```text
//!  guest     0 ─────────── 3 GiB   (hole: devices)   4 GiB ──────────── ...
//!            └── span 0 ──┘                          └── span 1 ──┘
//!  vm.mem    0 ─────────── 3 GiB ─────────────────── size            (no hole)
//! ```
//!
//! Memory is private to the process (`MAP_PRIVATE`): fork(2) copies it on write, and over a file a
//! write makes a page private. So the private pages are all that differs from the file, with one
//! exception: discarded blocks. `MADV_DONTNEED` on a mapping of a file would show the file again.
//! So a discarded block is replaced by fresh anonymous memory and remembered: its missing pages are
//! zeroes, not the contents of the file.
//!
//! Blocks that are holes of the file are anonymous memory from the start, and all anonymous memory
//! asks for huge pages. For memory that a template left free and a machine fills, a fork then
//! copies a 512th of the page-table entries (RFD 009).
#![allow(unsafe_code)]

use crate::{Error, Result};
use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use vm_memory::{
    GuestAddress, GuestMemoryMmap, GuestRegionMmap,
    mmap::{MmapRegion, MmapRegionBuilder},
};

/// The device addresses below 4 GiB. There is no RAM.
pub const HOLE: Range<u64> = 3 << 30..4 << 30;
/// Memory over a file is mapped and discarded in blocks of this size: each may cost the kernel a
/// mapping. A huge page has the same size.
pub const BLOCK: u64 = 2 << 20;
const PAGE: u64 = keiki_sys::pages::PAGE;
const MIN: u64 = 1 << 20;
const MAX: u64 = 64 << 30;

/// Guest memory as devices and loaders see it.
pub type Memory = GuestMemoryMmap<()>;

/// Whether to ask the kernel for huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    #[default]
    No,
    /// `MADV_HUGEPAGE`.
    Advise,
}

/// A contiguous part of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Address in the guest.
    pub guest: u64,
    /// Address in this process.
    pub host: u64,
    /// Offset in a memory file.
    pub offset: u64,
    pub len: u64,
}

/// The spans of RAM of this size, not yet mapped.
pub fn layout(size: u64) -> Result<Vec<Span>> {
    if !(MIN..=MAX).contains(&size) || !size.is_multiple_of(PAGE) {
        return Err(Error::Size(size));
    }
    let low = size.min(HOLE.start);
    let mut spans = vec![Span { guest: 0, host: 0, offset: 0, len: low }];
    if size > low {
        spans.push(Span { guest: HOLE.end, host: 0, offset: low, len: size - low });
    }
    Ok(spans)
}

/// All RAM of one machine. A clone shares the memory.
#[derive(Debug, Clone)]
pub struct GuestRam {
    memory: Memory,
    spans: Vec<Span>,
    size: u64,
    /// Blocks that lay over the file at first.
    mapped: Blocks,
    /// Blocks that still lie over the file.
    over_file: Blocks,
}

/// A set of blocks, one bit each.
#[derive(Debug, Clone)]
struct Blocks(Arc<[AtomicU64]>);

impl Blocks {
    /// An empty set for RAM of this size.
    fn none(size: u64) -> Self {
        Self((0..size.div_ceil(BLOCK).div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, block: u64) -> &AtomicU64 {
        let last = self.0.len() - 1;
        &self.0[bytes(block / 64).min(last)]
    }

    fn has(&self, block: u64) -> bool {
        self.word(block).load(Ordering::Relaxed) & 1 << (block % 64) != 0
    }

    fn add(&self, block: u64) {
        self.word(block).fetch_or(1 << (block % 64), Ordering::Relaxed);
    }

    fn remove(&self, block: u64) {
        self.word(block).fetch_and(!(1 << (block % 64)), Ordering::Relaxed);
    }
}

impl GuestRam {
    /// RAM of zeroes.
    pub fn anonymous(size: u64, huge: HugePages) -> Result<Self> {
        let mut spans = layout(size)?;
        let mut regions = Vec::new();
        for span in &mut spans {
            let region = MmapRegionBuilder::<()>::new(bytes(span.len))
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
                .build()
                .map_err(|error| Error::Call("mapping guest memory", io::Error::other(error)))?;
            span.host = region.as_ptr() as u64;
            regions.push(guest_region(region, span.guest)?);
        }
        let memory = Memory::from_regions(regions)
            .map_err(|error| Error::Call("laying out guest memory", io::Error::other(error)))?;
        let ram = Self { memory, spans, size, mapped: Blocks::none(size), over_file: Blocks::none(size) };
        if huge == HugePages::Advise {
            ram.spans.iter().for_each(|span| ram.advise_huge(span.host, span.len));
        }
        Ok(ram)
    }

    /// RAM over `file`, mapped privately: writes stay in this process. The descriptor is not needed
    /// afterwards.
    pub fn over(file: &File) -> Result<Self> {
        let looking = "inspecting the memory file";
        let size = file.metadata().map_err(Error::io(looking))?.len();
        let ram = Self::anonymous(size, HugePages::Advise)?;
        for data in keiki_sys::sparse::data(file, BLOCK).map_err(Error::io(looking))? {
            for span in &ram.spans {
                let from = data.start.max(span.offset);
                let to = data.end.min(span.offset + span.len);
                if from < to {
                    map_fixed(span.host + (from - span.offset), to - from, Some((file, from)))
                        .map_err(Error::io("mapping the memory file"))?;
                }
            }
            for block in data.start / BLOCK..data.end.div_ceil(BLOCK) {
                ram.mapped.add(block);
                ram.over_file.add(block);
            }
        }
        Ok(ram)
    }

    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// In the order of guest addresses.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Frees `len` bytes at guest address `at`; they then read as zeroes. Returns the number of
    /// bytes freed: over a file whole blocks only, elsewhere whole pages. Ignores addresses outside
    /// RAM.
    ///
    /// # Errors
    /// On error a part of the range may be freed.
    pub fn discard(&self, at: u64, len: u64) -> io::Result<u64> {
        let asked = at..at.saturating_add(len);
        let mut freed = 0;
        for span in &self.spans {
            let from = asked.start.clamp(span.guest, span.guest + span.len).next_multiple_of(PAGE);
            let to = asked.end.clamp(span.guest, span.guest + span.len) / PAGE * PAGE;
            if from < to {
                freed +=
                    self.discard_in(span, from - span.guest + span.offset..to - span.guest + span.offset)?;
            }
        }
        Ok(freed)
    }

    fn discard_in(&self, span: &Span, range: Range<u64>) -> io::Result<u64> {
        let mut freed = 0;
        let mut at = range.start;
        while at < range.end {
            let block = at / BLOCK;
            let whole = block * BLOCK..((block + 1) * BLOCK).min(span.offset + span.len);
            let part = at..whole.end.min(range.end);
            let host = span.host + (part.start - span.offset);
            let len = part.end - part.start;
            if !self.over_file.has(block) {
                self.advise(host..host + len, libc::MADV_DONTNEED)?;
                freed += len;
            } else if part == whole {
                map_fixed(host, len, None)?;
                self.over_file.remove(block);
                self.advise_huge(host, len);
                freed += len;
            }
            at = part.end;
        }
        Ok(freed)
    }

    /// The parts of the memory file that were discarded since it was mapped.
    #[must_use]
    pub fn detached(&self) -> Vec<Range<u64>> {
        self.parts(&(0..self.size), |block| self.mapped.has(block) && !self.over_file.has(block))
    }

    /// The parts of `part` of the memory file that RAM still lies over: no holes, and nothing that
    /// was discarded.
    #[must_use]
    pub fn over_file(&self, part: &Range<u64>) -> Vec<Range<u64>> {
        self.parts(part, |block| self.over_file.has(block))
    }

    /// The parts of `part` of the memory file that lie in wanted blocks.
    fn parts(&self, part: &Range<u64>, wanted: impl Fn(u64) -> bool) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut at = part.start;
        let end = part.end.min(self.size);
        while at < end {
            let (block, from) = (at / BLOCK, at);
            at = ((block + 1) * BLOCK).min(end);
            if !wanted(block) {
                continue;
            }
            match found.last_mut() {
                Some(last) if last.end == from => last.end = at,
                _ => found.push(from..at),
            }
        }
        found
    }

    /// Makes the pages of these parts of the memory file present without changing them.
    ///
    /// # Errors
    /// An error costs speed only: memory is right all the same.
    pub fn populate(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        self.advise_parts(ranges, libc::MADV_POPULATE_READ)?;
        self.anchor();
        Ok(())
    }

    /// Makes the pages of these parts of the memory file private without changing them.
    ///
    /// # Errors
    /// An error costs speed only: memory is right all the same.
    pub fn make_private(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        self.advise_parts(ranges, libc::MADV_POPULATE_WRITE)
    }

    /// Asks the kernel to read these parts of the memory file into its page cache. Does not wait.
    ///
    /// # Errors
    /// An error costs speed only: memory is right all the same.
    pub fn read_ahead(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        self.advise_parts(ranges, libc::MADV_WILLNEED)
    }

    fn advise_parts(&self, ranges: &[Range<u64>], advice: libc::c_int) -> io::Result<()> {
        ranges.iter().try_for_each(|range| {
            let pages = range.start / PAGE * PAGE..range.end.min(self.size).next_multiple_of(PAGE);
            self.pieces(&pages).try_for_each(|piece| self.advise(piece.host..piece.host + piece.len, advice))
        })
    }

    /// Where a part of the memory file lies in RAM: a piece for each span that has some of it.
    pub fn pieces(&self, part: &Range<u64>) -> impl Iterator<Item = Span> {
        self.spans.iter().filter_map(|span| {
            let from = part.start.max(span.offset);
            let len = part.end.min(span.offset + span.len).checked_sub(from).filter(|len| *len > 0)?;
            let skipped = from - span.offset;
            Some(Span { guest: span.guest + skipped, host: span.host + skipped, offset: from, len })
        })
    }

    /// Makes one page of each span private. fork(2) copies the page tables of a file mapping only
    /// if it has a private page. Without one every copy would take all page
    /// faults again.
    fn anchor(&self) {
        use std::sync::atomic::AtomicU8;
        for span in &self.spans {
            // SAFETY: the first byte of a span lies in a mapping that lives as long as `self`, and
            // is only ever accessed by the guest, by volatile accesses of devices, and by this
            // atomic addition of nothing.
            let byte = unsafe { AtomicU8::from_ptr(span.host as *mut u8) };
            byte.fetch_add(0, Ordering::Relaxed);
        }
    }

    /// Asks for huge pages. Memory is right without them.
    fn advise_huge(&self, host: u64, len: u64) {
        let _ = self.advise(host..host + len, libc::MADV_HUGEPAGE);
    }

    fn advise(&self, host: Range<u64>, advice: libc::c_int) -> io::Result<()> {
        debug_assert!(self.spans.iter().any(|s| s.host <= host.start && host.end <= s.host + s.len));
        // SAFETY: the range lies in a span, whose mapping lives as long as `self`. Advice changes
        // at most the contents of guest memory, to which there are no Rust references.
        let done = unsafe { libc::madvise(host.start as *mut _, bytes(host.end - host.start), advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// `u64` and `usize` have the same size on x86-64.
#[allow(clippy::cast_possible_truncation)]
pub(crate) const fn bytes(n: u64) -> usize {
    n as usize
}

fn guest_region(region: MmapRegion, at: u64) -> Result<GuestRegionMmap> {
    GuestRegionMmap::new(region, GuestAddress(at)).ok_or(Error::Size(at))
}

/// Replaces a part of a span by a private mapping of a file, or by fresh zero memory.
fn map_fixed(host: u64, len: u64, over: Option<(&File, u64)>) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let (flags, fd, offset) = match over {
        Some((file, offset)) => (flags, file.as_raw_fd(), offset),
        None => (flags | libc::MAP_ANONYMOUS, -1, 0),
    };
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: callers pass a part of a span, which this process has mapped for guest memory only.
    // There are no Rust references to guest memory.
    let at = unsafe { libc::mmap(host as *mut _, bytes(len), prot, flags, fd, offset) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use vm_memory::Bytes;

    fn ones(size: u64) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; bytes(size)]).unwrap();
        file
    }

    fn byte(ram: &GuestRam, at: u64) -> u8 {
        ram.memory().read_obj(GuestAddress(at)).unwrap()
    }

    #[test]
    fn the_hole_is_left_out() {
        assert_eq!(layout(3 << 30).unwrap().len(), 1);
        let five = layout(5 << 30).unwrap();
        assert_eq!((five[0].guest, five[0].len), (0, 3 << 30));
        assert_eq!((five[1].guest, five[1].offset, five[1].len), (4 << 30, 3 << 30, 2 << 30));
        for wrong in [0, 4096, (1 << 20) + 1, MAX + 4096, u64::MAX] {
            assert!(matches!(layout(wrong), Err(Error::Size(size)) if size == wrong));
        }
        let ram = GuestRam::anonymous(5 << 30, HugePages::No).unwrap();
        ram.memory().write_obj(7_u8, GuestAddress((6 << 30) - 1)).unwrap();
        assert!(ram.memory().write_obj(7_u8, GuestAddress(HOLE.start)).is_err());
        assert!(ram.memory().write_obj(7_u8, GuestAddress(6 << 30)).is_err());
    }

    #[test]
    fn writes_stay_private() {
        let file = ones(4 << 20);
        let (a, b) = (GuestRam::over(&file).unwrap(), GuestRam::over(&file).unwrap());
        a.memory().write_obj(9_u8, GuestAddress(5)).unwrap();
        assert_eq!((byte(&a, 5), byte(&b, 5)), (9, 1));
        assert_eq!(byte(&GuestRam::over(&file).unwrap(), 5), 1);
    }

    #[test]
    fn discarded_memory_is_zero_and_never_the_base_again() {
        let ram = GuestRam::over(&ones(9 << 20)).unwrap();
        // Two whole blocks and parts of two others: only the whole ones go.
        let freed = ram.discard((2 << 20) - 4096, (4 << 20) + 8192).unwrap();
        assert_eq!(freed, 4 << 20);
        assert_eq!(ram.detached().as_slice(), std::slice::from_ref(&(2 << 20..6 << 20)));
        assert_eq!(byte(&ram, (2 << 20) - 1), 1);
        assert!([2_u64 << 20, 4 << 20, (6 << 20) - 1].iter().all(|at| byte(&ram, *at) == 0));
        assert_eq!(byte(&ram, 6 << 20), 1);
        // A block that is detached is discarded by pages.
        ram.memory().write_obj(3_u8, GuestAddress(3 << 20)).unwrap();
        assert_eq!(ram.discard((3 << 20) + 1, 4095).unwrap(), 0);
        assert_eq!(ram.discard(3 << 20, 4096).unwrap(), 4096);
        assert_eq!(byte(&ram, 3 << 20), 0);
        // The short block at the end, and more than there is.
        assert_eq!(ram.discard(8 << 20, u64::MAX).unwrap(), 1 << 20);
        assert_eq!(byte(&ram, (9 << 20) - 1), 0);
        assert_eq!(ram.discard(u64::MAX - 5, u64::MAX).unwrap(), 0);
    }

    #[test]
    fn populating_changes_nothing() {
        let ram = GuestRam::over(&ones(4 << 20)).unwrap();
        ram.read_ahead(&[5..4097, 2 << 20..900 << 20]).unwrap();
        ram.populate(&[0..10, 1 << 20..2 << 20, 3 << 20..900 << 20]).unwrap();
        assert!((0..4_u64 << 20).step_by(4096).all(|at| byte(&ram, at) == 1));
        assert_eq!(ram.detached(), []);
    }
}
