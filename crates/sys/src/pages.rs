//! The private pages of a mapping, and their contents.
//!
//! A `MAP_PRIVATE` mapping shows its file until a page is written; then that page is private to the
//! process. The contents are those pages over the file. A page is private if it is present or
//! swapped out, does not belong to the file, and is not the shared zero page.
//!
//! Since Linux 6.7 `PAGEMAP_SCAN` returns the ranges. On older kernels every entry of
//! `/proc/PID/pagemap` is read. These entries do not show the zero page, so it counts as private,
//! which is correct (it reads as zeroes) and only costs a copy.

use rustix::{fd::AsRawFd, io::Errno};
use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

/// Size of a page on x86-64.
pub const PAGE: u64 = 4096;

/// The private pages in `range`, which are addresses of the process whose `/proc/PID/pagemap` this
/// is. Returns ranges in order. The process must not run, or the result mixes several instants.
pub fn private_pages(pagemap: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    match scan(pagemap, range.clone()) {
        Err(error)
            if [Errno::NOTTY, Errno::INVAL]
                .iter()
                .any(|e| error.raw_os_error() == Some(e.raw_os_error())) =>
        {
            private_pages_by_entry(pagemap, range)
        }
        result => result,
    }
}

const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO_PAGE: u64 = 1 << 5;

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;

fn scan(pagemap: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut regions = vec![Region::default(); 4096];
    let mut at = range.start;
    while at < range.end {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start: at,
            end: range.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: IS_FILE | IS_ZERO_PAGE,
            category_mask: IS_FILE | IS_ZERO_PAGE,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            return_mask: IS_PRESENT | IS_SWAPPED,
            ..ScanArg::default()
        };
        // SAFETY: the descriptor is open, `arg` is the structure of this request, and `vec` points
        // to `vec_len` regions that live across the call and are not borrowed elsewhere.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for region in regions.iter().take(count) {
            push(&mut found, region.start..region.end);
        }
        if count < regions.len() {
            break;
        }
        // The kernel may report an end before the last region that it returned: it remembers an
        // earlier stop, after every 512 ranges. The returned regions are in order and complete.
        match regions.last() {
            Some(last) if last.end > at => at = last.end,
            _ => return Err(io::Error::other("the page scan does not advance")),
        }
    }
    Ok(found)
}

/// The same by reading one entry per page, for Linux before 6.7.
pub fn private_pages_by_entry(pagemap: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    by_entry(pagemap, range, |entry| entry & (PRESENT | SWAPPED) != 0 && entry & FILE == 0)
}

/// The pages in `range` that the process has mapped from a file and has not written.
pub fn file_pages(pagemap: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    by_entry(pagemap, range, |entry| entry & PRESENT != 0 && entry & FILE != 0)
}

/// Bits of an entry.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE: u64 = 1 << 61;

fn by_entry(pagemap: &File, range: Range<u64>, wanted: impl Fn(u64) -> bool) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    let mut page = range.start / PAGE;
    let last = range.end.div_ceil(PAGE);
    while page < last {
        let want = usize::try_from((last - page) * 8).unwrap_or(usize::MAX).min(buffer.len());
        let chunk = buffer.get_mut(..want).unwrap_or_default();
        pagemap.read_exact_at(chunk, page * 8)?;
        for entry in chunk.as_chunks::<8>().0 {
            let entry = u64::from_ne_bytes(*entry);
            if wanted(entry) {
                push(&mut found, page * PAGE..(page + 1) * PAGE);
            }
            page += 1;
        }
    }
    Ok(found)
}

/// Appends a range, and joins it with an adjacent one.
fn push(ranges: &mut Vec<Range<u64>>, next: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => ranges.push(next),
    }
}

/// Fills `buffer` from the memory of another process at `address`.
///
/// # Errors
/// A short read is `UnexpectedEof`.
pub fn read_memory(pid: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let remote =
            libc::iovec { iov_base: (address + done as u64) as *mut libc::c_void, iov_len: rest.len() };
        // SAFETY: `local` describes bytes that we borrow mutably. The kernel looks up the remote
        // addresses in the other process and reports those that do not exist.
        let count = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(count) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}
