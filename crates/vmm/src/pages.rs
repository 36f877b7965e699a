//! Pages that a machine is known to touch first: it is given them before it runs, all at once. Otherwise each costs it an exit
//! (RFD 013).
//!
//! They are a hint by the node, of a file that it has checked. What is not in RAM is left out, and what the memory file does not lie
//! under any more: there a huge page would be taken for one page.

use keiki_control::Pages;
use keiki_hv::{GuestRam, Vcpu};
use keiki_sys::pages::PAGE;
use std::{fs::File, io::Read, ops::Range, os::fd::OwnedFd};

/// Bytes of a list.
const MAX: u64 = 512 << 10;
/// Most pages that are given, and most of which copies are made: a snapshot says which, and has no say in how many.
const GIVEN: u64 = 16 << 10;
const COPIED: u64 = 1 << 10;

/// Parts of the memory file.
#[derive(Debug, Default)]
pub struct First {
    all: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

impl First {
    /// Those of a list. One that cannot be read is no hint.
    pub fn read(list: &OwnedFd) -> Self {
        let mut bytes = Vec::new();
        let Ok(list) = list.try_clone() else { return Self::default() };
        if File::from(list).take(MAX).read_to_end(&mut bytes).is_err() {
            return Self::default();
        }
        let mut first = Self::default();
        let (mut given, mut copied) = (0, 0);
        for pages in Pages::decode(&bytes).0 {
            let count = u64::from(pages.count);
            let start = u64::from(pages.first) * PAGE;
            let range = start..start + count * PAGE;
            given += count;
            if given > GIVEN {
                break;
            }
            if pages.written {
                copied += count;
                first.written.push(range.clone());
            }
            first.all.push(range);
        }
        if copied > COPIED {
            // The first run did something of its own, for which others need not pay.
            first.written.clear();
        }
        first
    }

    /// Gives the guest of this vCPU all of them: its own copies of those that it will write.
    ///
    /// # Errors
    /// What the host did not do. Nothing is wrong then.
    pub fn give(&self, ram: &GuestRam, vcpu: &Vcpu) -> crate::Result<()> {
        let written: Vec<_> = self.written.iter().flat_map(|part| ram.over_file(part)).collect();
        ram.make_private(&written).map_err(crate::Error::host("copying pages ahead"))?;
        for range in self.all.iter().flat_map(|part| ram.over_file(part)) {
            ram.pieces(&range).try_for_each(|piece| vcpu.prefault(piece.guest, piece.len))?;
        }
        Ok(())
    }
}
