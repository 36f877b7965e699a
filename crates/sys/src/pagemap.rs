//! Which pages of a private mapping are the process's own.
//!
//! A page of a `MAP_PRIVATE` file mapping is shared with the file until it is written; then it is anonymous.
//! `PAGEMAP_SCAN` (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst) finds those in one call: present or
//! swapped out, not file-backed, not the zero page. Older kernels are asked page by page.

#![allow(unsafe_code)]

use std::{fs::File, io, ops::Range, os::fd::AsRawFd, os::unix::fs::FileExt};

/// Bytes of a page. Checked at run time by [`page_size_is_right`].
pub const PAGE: u64 = 4096;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Regions that one call may return.
const REGIONS: usize = 1024;

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

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Are pages as large as this module takes them to be?
#[must_use]
pub fn page_size_is_right() -> bool {
    rustix::param::page_size() as u64 == PAGE
}

/// Address ranges within `range` whose pages differ from the mapped file, in order. `pagemap` is
/// `/proc/PID/pagemap` of the process, which must not be changing the mapping meanwhile.
///
/// # Errors
/// If the pagemap cannot be read.
pub fn private_pages(pagemap: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    match scan(pagemap, range.clone()) {
        // ENOTTY: the kernel has no such call.
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => entries(pagemap, range),
        done => done,
    }
}

fn scan(pagemap: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut regions = vec![Region::default(); REGIONS];
    let mut start = range.start;
    while start < range.end {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start,
            end: range.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS as u64,
            category_inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            ..ScanArg::default()
        };
        // SAFETY: `arg` is the struct this request takes, with its size in it; `vec` points to `vec_len`
        // regions that live and are not otherwise used during the call.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for region in regions.get(..count).unwrap_or_default() {
            push(&mut found, region.start..region.end);
        }
        if arg.walk_end <= start {
            break;
        }
        start = arg.walk_end;
    }
    Ok(found)
}

/// The classic way: one 64-bit entry a page. Bit 63 present, 62 swapped, 61 file-backed or shared.
fn entries(pagemap: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    const BATCH: usize = 8192;
    let mut found = Vec::new();
    let mut buffer = vec![0; BATCH * 8];
    let mut at = range.start;
    while at < range.end {
        let pages = usize::try_from((range.end - at) / PAGE).unwrap_or(BATCH).clamp(1, BATCH);
        let bytes = buffer.get_mut(..pages * 8).unwrap_or_default();
        pagemap.read_exact_at(bytes, at / PAGE * 8)?;
        for entry in bytes.chunks_exact(8) {
            let entry = entry.iter().rev().fold(0u64, |word, &byte| (word << 8) | u64::from(byte));
            if entry >> 62 != 0 && entry & (1 << 61) == 0 {
                push(&mut found, at..at + PAGE);
            }
            at += PAGE;
        }
    }
    Ok(found)
}

fn push(found: &mut Vec<Range<u64>>, next: Range<u64>) {
    match found.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => found.push(next),
    }
}

/// Where a process has mapped the file with this device and inode number, as `/proc/PID/maps` tells.
#[must_use]
pub fn mappings_of(maps: &str, device: u64, inode: u64) -> Vec<(Range<u64>, u64)> {
    let wanted = format!("{:02x}:{:02x}", libc::major(device), libc::minor(device));
    maps.lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            let (start, end) = words.next()?.split_once('-')?;
            let (offset, found, number) = (words.nth(1)?, words.next()?, words.next()?);
            if found != wanted || number.parse() != Ok(inode) {
                return None;
            }
            let hex = |text| u64::from_str_radix(text, 16).ok();
            Some((hex(start)?..hex(end)?, hex(offset)?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{PAGE, entries, mappings_of, page_size_is_right, scan};
    use proptest::{collection::btree_set, prop_assert_eq, proptest, test_runner::Config};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::{collections::BTreeSet, fs::File, io::Write, ops::Range};

    const PAGES: u64 = 64;

    fn pages(ranges: &[Range<u64>], base: u64) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| (range.start..range.end).step_by(4096)).map(|at| (at - base) / PAGE).collect()
    }

    proptest! {
        #![proptest_config(Config::with_cases(64))]
        /// Ground truth: exactly the pages written through a private mapping are private, whatever was read.
        #[test]
        fn finds_exactly_the_written_pages(
            written in btree_set(0..PAGES, 0..40), read in btree_set(0..PAGES, 0..40), of_file in proptest::bool::ANY,
        ) {
            assert!(page_size_is_right());
            let mut file = tempfile::tempfile()?;
            file.write_all(&vec![7; usize::try_from(PAGES * PAGE)?])?;
            let length = usize::try_from(PAGES * PAGE)?;
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping of our own; its pages are touched within its length and it is unmapped last.
            let base = unsafe {
                if of_file {
                    mmap(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE, &file, 0)?
                } else {
                    rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE)?
                }
            };
            for page in &read {
                // SAFETY: within the mapping.
                let _ = unsafe { base.cast::<u8>().add(usize::try_from(page * PAGE)?).read_volatile() };
            }
            for page in &written {
                // SAFETY: within the mapping.
                unsafe { base.cast::<u8>().add(usize::try_from(page * PAGE)?).write_volatile(9) };
            }
            let pagemap = File::open("/proc/self/pagemap")?;
            let range = base as u64..base as u64 + PAGES * PAGE;
            let scanned = scan(&pagemap, range.clone());
            let listed = entries(&pagemap, range.clone())?;
            // SAFETY: the whole mapping made above, not used any more.
            unsafe { munmap(base, length)? };
            if let Ok(scanned) = scanned {
                prop_assert_eq!(pages(&scanned, range.start), written.clone());
            }
            if of_file {
                // The old way cannot tell the zero page of an anonymous mapping; files have none.
                prop_assert_eq!(pages(&listed, range.start), written);
            }
        }
    }

    #[test]
    fn mappings_are_found_by_inode() {
        let maps = "7f00-8f00 rw-p 00001000 fe:01 42   /a b (deleted)\n8f00-9f00 rw-p 0 00:00 0\n9f00-af00 r--p 0 fe:01 43 /c\n";
        let device = libc::makedev(0xfe, 1);
        assert_eq!(mappings_of(maps, device, 42), [(0x7f00..0x8f00, 0x1000)]);
        assert!(mappings_of(maps, device, 44).is_empty());
    }
}
