//! What a machine touches first, read ahead.
//!
//! The first machine that is thawed from stored files is looked at when it has run for a moment, or before it ends: which
//! pages of the memory file it has by then. They are written beside that file, as ranges. Whoever loads the files later has the kernel read these
//! into its page cache, and waits for nothing. A machine on a host that has not read the file yet would wait for each
//! (RFD 010). And each machine that is thawed later is given them before it runs, instead of with an exit for each
//! (RFD 013). It is a hint: without it, or with a wrong one, all is right and only slower.
//!
//! ```text
//!   0          8        12       44
//!   KEIKIWS\n  version  BLAKE3   body: runs of pages, in order, as of `keiki_control::Pages`
//!              u32      of body
//! ```
//!
//! A guest chooses what it touches, so the file is believed no more than others: it is read up to a limit, checked, and names
//! parts of one file, which its own machines map anyway.

use crate::{
    EngineError, Result,
    process::{blocking, remove_file},
};
use keiki_control::Pages;
use keiki_sys::pages::{PAGE, file_pages, private_pages_by_entry};
use rustix::fs::{Advice, MemfdFlags, fadvise, memfd_create};
use std::{
    fs::{self, File},
    io::{Read, Seek, Write},
    num::NonZeroU64,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::{sync::oneshot, task::JoinHandle, time::timeout};

/// Beside the memory file.
const NAME: &str = "vm.pages";
const MAGIC: [u8; 8] = *b"KEIKIWS\n";
const VERSION: u32 = 2;
const HEADER: usize = 44;
/// Most ranges that are written or read.
const RANGES: usize = 64 << 10;
/// Most pages in them: a guest that touches everything has no working set.
const PAGES: u64 = 128 << 10;
/// How long a first run is looked at: until the machine is released and its user has begun.
const FIRST_RUN: Duration = Duration::from_secs(2);
/// One that was shorter tells nothing.
const LEAST_RUN: Duration = Duration::from_millis(100);
/// How long the end of a machine waits for the look.
const LOOK: Duration = Duration::from_secs(2);

/// Has the kernel read what a first run of these files touched, if that is known.
pub(super) fn read_ahead(dir: &Path, memory: &File) {
    let read = || -> std::io::Result<()> {
        for Pages { first, count, .. } in recorded(dir, memory)? {
            let len = NonZeroU64::new(u64::from(count) * PAGE);
            fadvise(memory, u64::from(first) * PAGE, len, Advice::WillNeed)?;
        }
        Ok(())
    };
    if let Err(error) = read() {
        tracing::debug!(dir = %dir.display(), %error, "nothing is read ahead");
    }
}

/// What a first run of these files touched, as a list for a monitor. None: it is not known.
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

/// What was recorded; nothing, if nothing was. A record that is none is removed: the next first run is recorded anew.
fn recorded(dir: &Path, memory: &File) -> std::io::Result<Vec<Pages>> {
    let path = dir.join(NAME);
    let file = match File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take((HEADER + RANGES * 8 + 1) as u64).read_to_end(&mut bytes)?;
    parse(&bytes, memory.metadata()?.len()).map_err(|why| {
        let _ = remove_file(&path);
        std::io::Error::other(why)
    })
}

/// A machine that will be looked at.
pub(super) struct FirstRun {
    ends: oneshot::Sender<()>,
    look: JoinHandle<()>,
}

impl FirstRun {
    /// It is about to end: looks now, unless that was done.
    pub(super) async fn ends(self) {
        let _ = self.ends.send(());
        let _ = timeout(LOOK, self.look).await;
    }
}

/// Looks at a machine that was thawed from these files when it has run for a moment, or before it ends. None: one was
/// looked at before.
pub(super) fn record_later(dir: &Path, memory: &File, pid: u32) -> Option<FirstRun> {
    let (path, inode) = (dir.join(NAME), memory.metadata().ok()?.ino());
    if path.exists() {
        return None;
    }
    let (ends, ending) = oneshot::channel();
    let begun = Instant::now();
    let look = tokio::spawn(async move {
        let _ = timeout(FIRST_RUN, ending).await;
        // Another may have been quicker.
        if begun.elapsed() < LEAST_RUN || path.exists() {
            return;
        }
        let at = path.clone();
        if let Err(error) = blocking(move || record(&at, inode, pid)).await {
            // The machine has ended, or its files are gone: the next one is looked at.
            tracing::debug!(path = %path.display(), %error, "no working set");
        }
    });
    Some(FirstRun { ends, look })
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
    let (maps, pagemap) = (proc.join("maps"), proc.join("pagemap"));
    let text = fs::read_to_string(&maps).map_err(EngineError::at("read", &maps))?;
    let pages = File::open(&pagemap).map_err(EngineError::at("open", &pagemap))?;
    let failed = || EngineError::at("read", &pagemap);
    let mut found = Vec::new();
    for (start, end, offset) in text.lines().filter_map(|line| mapping(line, inode)) {
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

/// Beginning, end and offset of a private mapping of this file.
fn mapping(line: &str, inode: u64) -> Option<(u64, u64, u64)> {
    let mut words = line.split_ascii_whitespace();
    let (range, access, offset, _, file) =
        (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    (access == "rw-p" && file.parse::<u64>() == Ok(inode)).then_some((
        number(start)?,
        number(end)?,
        number(offset)?,
    ))
}

fn bytes(all: &[Pages]) -> Vec<u8> {
    let body = Pages::encode(all);
    [&MAGIC[..], &VERSION.to_le_bytes(), blake3::hash(&body).as_bytes(), &body].concat()
}

/// The reverse of [`bytes`], for a memory file of this size. Any bytes may come.
fn parse(bytes: &[u8], size: u64) -> std::result::Result<Vec<Pages>, &'static str> {
    let (header, body) = bytes.split_at_checked(HEADER).ok_or("it is cut short")?;
    let (magic, rest) = header.split_at(MAGIC.len());
    let (version, sum) = rest.split_at(4);
    let (all, left) = Pages::decode(body);
    match () {
        () if magic != MAGIC => return Err("it does not begin as one"),
        () if version != VERSION.to_le_bytes() => return Err("it has another version"),
        () if all.len() > RANGES || left > 0 => return Err("it is too long or cut short"),
        () if blake3::hash(body).as_bytes().as_slice() != sum => return Err("its checksum differs"),
        () => {}
    }
    let mut end = 0;
    for Pages { first, count, .. } in &all {
        if u64::from(*first) < end || *count == 0 {
            return Err("its ranges are not in order");
        }
        end = u64::from(*first) + u64::from(*count);
    }
    if end * PAGE > size { Err("it names pages behind the end of memory") } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::{HEADER, PAGE, Pages, RANGES, bytes, mapping, parse};

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
        assert!(parse(&good, SIZE - 1).is_err_and(|why| why.contains("behind the end")));
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
        assert_eq!(bytes(&pages(&many)).len(), HEADER + (RANGES + 1) * 8);
        assert_eq!(parse(&bytes(&pages(&many)), u64::MAX), Err("it is too long or cut short"));
    }

    #[test]
    fn guest_memory_is_found_among_mappings() {
        let line = "7f0000000000-7f0000400000 rw-p 00200000 fe:00 1234   /store/vm.mem (deleted)";
        assert_eq!(mapping(line, 1234), Some((0x7f00_0000_0000, 0x7f00_0040_0000, 0x20_0000)));
        assert_eq!(mapping(line, 1235), None);
        assert_eq!(mapping(&line.replace("rw-p", "rw-s"), 1234), None);
        assert_eq!(mapping("7f0000000000-7f0000400000 rw-p 00000000 00:00 0", 1234), None);
    }
}
