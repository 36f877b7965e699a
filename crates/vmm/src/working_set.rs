//! The working set: pages that a machine is known to touch first. They are mapped into the guest
//! before it runs, all at once. Otherwise each of them costs an exit (RFD 013).
//!
//! The list is a hint from the node, from a file that the node has checked. Pages outside RAM are
//! left out, and so are pages that are no longer mapped from the memory file: there each page would
//! take a whole huge page.

use keiki_control::Pages;
use keiki_hv::{GuestRam, Vcpu};
use keiki_sys::pages::PAGE;
use std::{fs::File, io::Read, ops::Range, os::fd::OwnedFd};

/// Longest list that is read.
const MAX_BYTES: u64 = 512 << 10;
/// Most pages that are mapped, and most of them that are copied. The snapshot says which pages, but
/// not how many.
const MAX_MAPPED: u64 = 16 << 10;
const MAX_COPIED: u64 = 1 << 10;

/// Ranges of the memory file.
#[derive(Debug, Default)]
pub struct WorkingSet {
    all: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

impl WorkingSet {
    /// Reads a list. A list that cannot be read is empty.
    pub fn read(list: &OwnedFd) -> Self {
        let mut bytes = Vec::new();
        let Ok(list) = list.try_clone() else { return Self::default() };
        if File::from(list).take(MAX_BYTES).read_to_end(&mut bytes).is_err() {
            return Self::default();
        }
        let mut set = Self::default();
        let (mut mapped, mut copied) = (0, 0);
        for pages in Pages::decode(&bytes).0 {
            let count = u64::from(pages.count);
            let start = u64::from(pages.first) * PAGE;
            let range = start..start + count * PAGE;
            mapped += count;
            if mapped > MAX_MAPPED {
                break;
            }
            if pages.written {
                copied += count;
                set.written.push(range.clone());
            }
            set.all.push(range);
        }
        if copied > MAX_COPIED {
            // The recorded run did unusual work, and other machines need not pay for it.
            set.written.clear();
        }
        set
    }

    /// Maps all pages into the guest of this vCPU, and copies those that it will write. An error
    /// costs speed only.
    pub fn map_into(&self, ram: &GuestRam, vcpu: &Vcpu) -> crate::Result<()> {
        let written: Vec<_> = self.written.iter().flat_map(|part| ram.over_file(part)).collect();
        ram.make_private(&written).map_err(crate::Error::host("copying the working set"))?;
        for range in self.all.iter().flat_map(|part| ram.over_file(part)) {
            ram.pieces(&range).try_for_each(|piece| vcpu.prefault(piece.guest, piece.len))?;
        }
        Ok(())
    }
}
