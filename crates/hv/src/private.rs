//! Writes the private pages of RAM over its base, into a file.
//!
//! The file starts as a reflink of the base, or empty without a base. Discarded blocks are punched
//! out of it, private pages are written, and private pages of zeroes are punched. Nothing else is
//! touched, so the cost follows what has changed.
//!
//! `/proc/PID/pagemap` tells which pages are private. This process cannot open it, because it is
//! not dumpable; it receives an open descriptor. The page map of another process would scan without
//! an error and give a wrong image. So before a page map is trusted, some pages, chosen at random,
//! are touched and looked for in it.
#![allow(unsafe_code)]

use crate::{Error, GuestRam, Result, memory::bytes};
use keiki_sys::{
    files::punch,
    pages::{PAGE, private_pages},
};
use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};
use vm_memory::{Bytes, GuestAddress};

/// Bytes copied at once.
const CHUNK: u64 = 1 << 20;
/// Each adds one random bit.
const CANARY_PAGES: u64 = 64;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    pub pages: u64,
    /// Private pages of zeroes, which were punched.
    pub zeroed: u64,
    /// Bytes of discarded blocks, which were punched.
    pub discarded: u64,
}

impl GuestRam {
    /// The private pages as ranges of the memory file, in order. Memory must not change meanwhile.
    ///
    /// # Errors
    /// [`Error::ForeignPagemap`] if `pagemap` belongs to another process.
    pub fn private(&self, pagemap: &File) -> Result<Vec<Range<u64>>> {
        check_pagemap(pagemap)?;
        let mut found = Vec::new();
        for span in self.spans() {
            let host = span.host..span.host + span.len;
            let pages = private_pages(pagemap, host).map_err(Error::io("scanning private pages"))?;
            let offset = |at: u64| at - span.host + span.offset;
            found.extend(pages.into_iter().map(|range| offset(range.start)..offset(range.end)));
        }
        Ok(found)
    }

    /// Writes RAM to `file`, which holds the base or nothing. `private` are the private pages.
    /// Memory must not change meanwhile.
    pub fn write_private(&self, private: &[Range<u64>], file: &File) -> Result<Written> {
        let mut written = Written::default();
        let failed = Error::io("writing the memory file");
        self.write_ranges(file, private, &mut written).map_err(failed)?;
        Ok(written)
    }

    fn write_ranges(&self, file: &File, private: &[Range<u64>], written: &mut Written) -> io::Result<()> {
        file.set_len(self.size())?;
        for range in self.detached() {
            punch(file, range.start, range.end - range.start)?;
            written.discarded += range.end - range.start;
        }
        let mut buffer = vec![0; bytes(CHUNK)];
        for range in private {
            let mut at = range.start;
            while at < range.end {
                let len = (range.end - at).min(CHUNK);
                let chunk = buffer.get_mut(..bytes(len)).unwrap_or_default();
                self.read_file_range(at, chunk)?;
                write_chunk(file, at, chunk, written)?;
                at += len;
            }
        }
        Ok(())
    }

    /// Reads RAM at an offset of the memory file.
    fn read_file_range(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let span = self.spans().iter().find(|s| (s.offset..s.offset + s.len).contains(&offset));
        let span = span.ok_or(io::ErrorKind::InvalidInput)?;
        let at = GuestAddress(span.guest + (offset - span.offset));
        self.memory().read_slice(buffer, at).map_err(io::Error::other)
    }
}

/// Writes runs of pages with content, and punches runs of zeroes.
fn write_chunk(file: &File, at: u64, chunk: &[u8], written: &mut Written) -> io::Result<()> {
    let page = bytes(PAGE);
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let mut from = 0;
    while from < chunk.len() {
        let rest = chunk.get(from..).unwrap_or_default();
        let zero = is_zero(rest.get(..page).unwrap_or(rest));
        let same = rest.chunks(page).take_while(|page| is_zero(page) == zero).count();
        let run = rest.get(..same * page).unwrap_or(rest);
        let to = at + from as u64;
        if zero {
            punch(file, to, run.len() as u64)?;
            written.zeroed += same as u64;
        } else {
            file.write_all_at(run, to)?;
            written.pages += same as u64;
        }
        from += run.len();
    }
    Ok(())
}

/// Checks that a page map is that of this process: it must show which canary pages were touched.
fn check_pagemap(pagemap: &File) -> Result<()> {
    let canary = Canary::new().map_err(Error::io("mapping canary pages"))?;
    let range = canary.at..canary.at + CANARY_PAGES * PAGE;
    let found = private_pages(pagemap, range).map_err(Error::io("scanning private pages"))?;
    let mut seen = 0_u64;
    for range in found {
        for page in (range.start - canary.at) / PAGE..(range.end - canary.at) / PAGE {
            seen |= 1 << page;
        }
    }
    if seen == canary.touched { Ok(()) } else { Err(Error::ForeignPagemap) }
}

struct Canary {
    at: u64,
    touched: u64,
}

impl Canary {
    fn new() -> io::Result<Self> {
        let mut touched = [0; 8];
        rustix::rand::getrandom(&mut touched, rustix::rand::GetRandomFlags::empty())?;
        // At least one page, and never all.
        let touched = u64::from_ne_bytes(touched) & !2 | 1;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes(CANARY_PAGES * PAGE), prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let canary = Self { at: at as u64, touched };
        // SAFETY: the mapping is ours. A huge page would hide the pattern.
        if unsafe { libc::madvise(at, bytes(CANARY_PAGES * PAGE), libc::MADV_NOHUGEPAGE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        for page in (0..CANARY_PAGES).filter(|page| touched & 1 << page != 0) {
            // SAFETY: the page lies in the mapping, which only this function uses.
            unsafe { at.cast::<u8>().add(bytes(page * PAGE)).write_volatile(1) };
        }
        Ok(canary)
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing points into it.
        unsafe { libc::munmap(self.at as *mut _, bytes(CANARY_PAGES * PAGE)) };
    }
}
