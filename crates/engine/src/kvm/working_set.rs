//! What a machine touches first, read ahead.
//!
//! Shortly after the first machine has been thawed from stored files, or before it ends, the pages
//! of the memory file that it has touched by then are recorded next to that file, as ranges: its
//! working set. A later load has the kernel read these into its page cache, so that a machine on a
//! host that has not read the file yet does not wait for each of them (RFD 010). A machine that is
//! thawed later gets them before it runs, instead of taking an exit for each (RFD 013). It is a
//! hint: without it, or with a wrong one, machines are correct, only slower.
//!
//! ```text
//!   0          8        12       44
//!   KEIKIWS\n  version  BLAKE3   body: runs of pages, in order, as of `keiki_control::Pages`
//!              u32      of body
//! ```
//!
//! A guest chooses what it touches, so the file is trusted no more than other files: it is read up
//! to a limit, checked, and names parts of one file, which its own machines map anyway.

use crate::{EngineError, Result, fsutil::remove_file, process::blocking};
use keiki_control::Pages;
use keiki_sys::{
    frame::{Frame, Length},
    maps,
    pages::{PAGE, file_pages, private_pages_by_entry},
};
use rustix::fs::{Advice, MemfdFlags, fadvise, memfd_create};
use std::{
    fs::{self, File},
    io::{Read, Seek, Write},
    num::NonZeroU64,
    ops::Range,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::{sync::oneshot, task::JoinHandle, time::timeout};

/// Beside the memory file.
const NAME: &str = "vm.pages";
const FRAME: Frame = Frame {
    magic: b"KEIKIWS\n",
    version: 2,
    length: Length::None,
    checksum: Some(|body| *blake3::hash(body).as_bytes()),
};
/// Most ranges that are written or read.
const RANGES: usize = 64 << 10;
/// Most pages in them: a guest that touches everything has no working set.
const PAGES: u64 = 128 << 10;
/// How long after a thaw it is recorded: the machine is released and its user has begun.
const FIRST_RUN: Duration = Duration::from_secs(2);
/// A shorter run is not recorded.
const LEAST_RUN: Duration = Duration::from_millis(100);
/// How long the end of a machine waits for the recording.
const RECORDING: Duration = Duration::from_secs(2);

/// Has the kernel read the working set of these files, if it is known.
pub(super) fn read_ahead(dir: &Path, memory: &File) {
    let read = || -> std::io::Result<()> {
        for Pages { first, count, .. } in recorded(dir, memory)? {
            let len = NonZeroU64::new(u64::from(count) * PAGE);
            fadvise(memory, u64::from(first) * PAGE, len, Advice::WillNeed)?;
        }
        Ok(())
    };
    if let Err(error) = read() {
        tracing::debug!(dir = %dir.display(), %error, "cannot read the working set ahead");
    }
}

/// The working set of these files, as a list for a monitor. None: it is not known.
pub(super) fn list(dir: &Path, memory: &File) -> Option<OwnedFd> {
    let list = || -> std::io::Result<Option<OwnedFd>> {
        let all = recorded(dir, memory)?;
        if all.is_empty() {
            return Ok(None);
        }
        let mut list = File::from(memfd_create("pages", MemfdFlags::CLOEXEC)?);
        list.write_all(&Pages::encode(&all))?;
        list.rewind()?;
        Ok(Some(list.into()))
    };
    list().inspect_err(|error| tracing::debug!(dir = %dir.display(), %error, "no working set")).ok().flatten()
}

/// What was recorded, if anything. A damaged record is removed: the next run is recorded again.
fn recorded(dir: &Path, memory: &File) -> std::io::Result<Vec<Pages>> {
    let path = dir.join(NAME);
    let file = match File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take((FRAME.header_len() + RANGES * 8 + 1) as u64).read_to_end(&mut bytes)?;
    parse(&bytes, memory.metadata()?.len()).map_err(|why| {
        let _ = remove_file(&path);
        std::io::Error::other(why)
    })
}

/// A machine whose working set will be recorded.
pub(super) struct FirstRun {
    ends: oneshot::Sender<()>,
    recording: JoinHandle<()>,
}

impl FirstRun {
    /// It is about to end: records now, unless that was done.
    pub(super) async fn ends(self) {
        let _ = self.ends.send(());
        let _ = timeout(RECORDING, self.recording).await;
    }
}

/// Records the working set of a machine that was thawed from these files, after a while or before
/// it ends. None: it is known.
pub(super) fn record_later(dir: &Path, memory: &File, pid: u32) -> Option<FirstRun> {
    let (path, inode) = (dir.join(NAME), memory.metadata().ok()?.ino());
    if path.exists() {
        return None;
    }
    let (ends, ending) = oneshot::channel();
    let begun = Instant::now();
    let recording = tokio::spawn(async move {
        let _ = timeout(FIRST_RUN, ending).await;
        // Another may have been quicker.
        if begun.elapsed() < LEAST_RUN || path.exists() {
            return;
        }
        let at = path.clone();
        if let Err(error) = blocking(move || record(&at, inode, pid)).await {
            // The machine has ended, or its files are gone: the next one is recorded.
            tracing::debug!(path = %path.display(), %error, "no working set");
        }
    });
    Some(FirstRun { ends, recording })
}

fn record(path: &Path, inode: u64, pid: u32) -> Result<()> {
    let pages = touched(inode, pid)?;
    if pages.is_empty() {
        return Ok(());
    }
    let new = path.with_extension(format!("pages.{pid}"));
    let written = fs::write(&new, bytes(&pages)).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        remove_file(&new)?;
    }
    written.map_err(EngineError::at("write", path))
}

/// The pages of a file that a process has.
fn touched(inode: u64, pid: u32) -> Result<Vec<Pages>> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let pagemap = proc.join("pagemap");
    let mappings = maps::of_process(pid).map_err(EngineError::at("read", &proc.join("maps")))?;
    let pages = File::open(&pagemap).map_err(EngineError::at("open", &pagemap))?;
    let failed = || EngineError::at("read", &pagemap);
    let mut found = Vec::new();
    for mapping in mappings.into_iter().filter(|mapping| mapping.private_writable && mapping.inode == inode) {
        let (Range { start, end }, offset) = (mapping.addresses, mapping.offset);
        let page = |address: u64| u32::try_from((address - start + offset) / PAGE).unwrap_or(u32::MAX);
        let written = private_pages_by_entry(&pages, start..end).map_err(failed())?;
        let read = file_pages(&pages, start..end).map_err(failed())?;
        for (ranges, written) in [(read, false), (written, true)] {
            found.extend(ranges.iter().map(|range| {
                let first = page(range.start);
                Pages { first, count: page(range.end) - first, written }
            }));
        }
    }
    found.sort_unstable();
    let mut room = PAGES;
    found.truncate(RANGES);
    found.retain(|pages| {
        let fits = u64::from(pages.count) <= room;
        room -= if fits { u64::from(pages.count) } else { 0 };
        fits
    });
    Ok(found)
}

fn bytes(all: &[Pages]) -> Vec<u8> {
    FRAME.encode(&Pages::encode(all))
}

/// The reverse of [`bytes`], for a memory file of this size. Accepts any bytes.
fn parse(bytes: &[u8], size: u64) -> std::result::Result<Vec<Pages>, String> {
    let body = FRAME.decode(bytes).map_err(|error| format!("it {error}"))?;
    let (all, left) = Pages::decode(body);
    if all.len() > RANGES || left > 0 {
        return Err("it is too long or truncated".into());
    }
    let mut end = 0;
    for Pages { first, count, .. } in &all {
        if u64::from(*first) < end || *count == 0 {
            return Err("its ranges are not in order".into());
        }
        end = u64::from(*first) + u64::from(*count);
    }
    if end * PAGE > size { Err("it names pages beyond the end of memory".into()) } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::{FRAME, PAGE, Pages, RANGES, bytes, parse};

    const SIZE: u64 = 100 * PAGE;
    const WRITTEN: u32 = 1 << 31;

    fn pages(of: &[(u32, u32)]) -> Vec<Pages> {
        let one = |(first, count): &(u32, u32)| Pages {
            first: *first,
            count: count & !WRITTEN,
            written: count & WRITTEN != 0,
        };
        of.iter().map(one).collect()
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_is() {
        let ranges = pages(&[(0, 1), (5, 3 | WRITTEN), (8, 92)]);
        let good = bytes(&ranges);
        assert_eq!(parse(&good, SIZE), Ok(ranges));
        assert_eq!(parse(&bytes(&[]), SIZE), Ok(Vec::new()));
        assert!(parse(&good, SIZE - 1).is_err_and(|why| why.contains("beyond the end")));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(parse(&bad, SIZE).is_err(), "byte {at}");
            assert!(parse(&good[..at], SIZE).is_err(), "cut at {at}");
        }
        // With a checksum that is right.
        for wrong in
            [vec![(5, 3), (0, 1)], vec![(5, 3), (7, 1)], vec![(5, WRITTEN)], vec![(u32::MAX, WRITTEN - 1)]]
        {
            assert!(parse(&bytes(&pages(&wrong)), SIZE).is_err(), "{wrong:?}");
        }
        let many: Vec<_> = (0..=u32::try_from(RANGES).unwrap_or(0)).map(|page| (2 * page, 1)).collect();
        assert_eq!(bytes(&pages(&many)).len(), FRAME.header_len() + (RANGES + 1) * 8);
        assert_eq!(parse(&bytes(&pages(&many)), u64::MAX), Err("it is too long or truncated".into()));
    }
}
