//! Pages that a machine is known to touch first: it is given them before it runs, all at once. Otherwise each costs it an exit.
//!
//! They are a hint by the node, of a file that it has checked; what is not in RAM is left out.

use keiki_hv::{GuestRam, Vcpu};
use std::{fs::File, io::Read, ops::Range, os::fd::OwnedFd};

/// Bytes of a list.
const MAX: u64 = 512 << 10;
const PAGE: u64 = 4096;
const WRITTEN: u32 = 1 << 31;

/// Parts of the memory file.
#[derive(Debug, Default)]
pub struct Pages {
    all: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

impl Pages {
    /// Those of a list. One that cannot be read is no hint.
    pub fn read(list: &OwnedFd) -> Self {
        let mut bytes = Vec::new();
        let Ok(list) = list.try_clone() else { return Self::default() };
        if File::from(list).take(MAX).read_to_end(&mut bytes).is_err() {
            return Self::default();
        }
        let mut pages = Self::default();
        for [a, b, c, d, e, f, g, h] in bytes.as_chunks::<8>().0 {
            let (first, count) = (u32::from_le_bytes([*a, *b, *c, *d]), u32::from_le_bytes([*e, *f, *g, *h]));
            let start = u64::from(first) * PAGE;
            let range = start..start + u64::from(count & !WRITTEN) * PAGE;
            if count & WRITTEN != 0 {
                pages.written.push(range.clone());
            }
            pages.all.push(range);
        }
        pages
    }

    /// Gives the guest of this vCPU all of them: its own copies of those that it will write.
    ///
    /// # Errors
    /// What the host did not do. Nothing is wrong then.
    pub fn give(&self, ram: &GuestRam, vcpu: &Vcpu) -> crate::Result<()> {
        ram.make_private(&self.written).map_err(crate::Error::host("copying pages ahead"))?;
        for span in ram.spans() {
            for range in &self.all {
                let (start, end) = (range.start.max(span.offset), range.end.min(span.offset + span.len));
                if start < end {
                    vcpu.prefault(span.guest + (start - span.offset), end - start)?;
                }
            }
        }
        Ok(())
    }
}
