//! Copies the pages of a guest's RAM that differ from its memory image.
//!
//! The machine is stopped only while its pages are read, into a buffer that was allocated, and
//! touched, before the pause. Looking for zeroes, writing to the file, and freeing the blocks of
//! pages that became zero come after the vCPUs run again. Without the buffer, or beyond its bound,
//! pages are written while the machine is stopped: slower, but correct.
//!
//! RAM is the image, mapped privately, with zero memory in between where the guest returned pages.
//! In those places the new image holds zeroes, regardless of what the old image has.

use crate::{EngineError, Result};
use keiki_sys::{
    host::kib,
    maps,
    pages::{PAGE, private_pages, read_memory},
};
use keiki_types::api::MemoryUse;
use std::{
    fs::{self, File},
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

/// The buffer's bound.
const MAX_STAGED: u64 = 256 << 20;
/// Room for pages that become private between the look ahead and the stop.
const HEADROOM: u64 = 8 << 20;
/// One read of the guest's memory.
const CHUNK: u64 = 2 << 20;
/// Shorter runs of zero pages are written, longer ones freed: a hole costs a transaction.
const MIN_HOLE: u64 = 16 * PAGE;
/// Reading is bound by page faults, which go in parallel.
const READERS: usize = 2;

/// A part of the guest's RAM in its monitor: addresses, and where in the memory image they begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) addresses: Range<u64>,
    pub(super) offset: u64,
    /// Zero memory instead of the image.
    pub(super) zero: bool,
}

/// Pages at `address` of the monitor that belong at `offset` of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    address: u64,
    offset: u64,
    len: u64,
}

/// Copies the private pages of one machine into one image.
pub(super) struct Copier {
    pid: u32,
    pagemap: File,
    source: File,
    mappings: Vec<Mapping>,
    /// The image has its zeroes where the machine has zero memory.
    cleared: bool,
    image: File,
    path: PathBuf,
    staged: Vec<u8>,
    runs: Vec<Run>,
}

impl Copier {
    /// Everything that can be done while the machine runs. `base` is the image it runs on, `path` the one to
    /// fill, which becomes a reflink of the base.
    pub(super) fn prepare(pid: u32, base: &Path, path: &Path) -> Result<Self> {
        let source = File::open(base).map_err(EngineError::at("open", base))?;
        let mappings = locate(pid, &source)?;
        let image =
            File::options().read(true).write(true).open(path).map_err(EngineError::at("open", path))?;
        keiki_sys::files::reflink(&source, &image).map_err(EngineError::at("fill", path))?;
        let pagemap = PathBuf::from(format!("/proc/{pid}/pagemap"));
        let pagemap = File::open(&pagemap).map_err(EngineError::at("open", &pagemap))?;
        let mut copier = Self {
            pid,
            pagemap,
            source,
            mappings,
            cleared: false,
            image,
            path: path.into(),
            staged: Vec::new(),
            runs: Vec::new(),
        };
        let expected: u64 = copier.scan()?.iter().map(|run| run.len).sum();
        let room = (expected + expected / 8 + HEADROOM).min(MAX_STAGED);
        // Not zeroes: those would be the kernel's zero page until the pause touches them.
        copier.staged = vec![1; usize::try_from(room).unwrap_or_default()];
        Ok(copier)
    }

    /// Reads the private pages, while the machine is stopped.
    pub(super) fn take(&mut self) -> Result<()> {
        self.mappings = locate(self.pid, &self.source)?;
        let mut runs = self.scan()?;
        let mut staged = Vec::new();
        let mut room = self.staged.len() as u64;
        runs.retain(|run| {
            let fits = run.len <= room;
            if fits {
                room -= run.len;
                staged.push(*run);
            }
            !fits
        });
        self.read_staged(&staged)?;
        self.runs = staged;
        if !runs.is_empty() {
            self.clear()?;
        }
        let mut buffer = vec![0; usize::try_from(CHUNK).unwrap_or_default()];
        for run in runs {
            let chunk = buffer.get_mut(..usize::try_from(run.len).unwrap_or_default()).unwrap_or_default();
            self.read(run.address, chunk)?;
            self.image.write_all_at(chunk, run.offset).map_err(EngineError::at("write", &self.path))?;
        }
        Ok(())
    }

    fn read_staged(&mut self, runs: &[Run]) -> Result<()> {
        let pid = self.pid;
        let mut jobs: Vec<Vec<(u64, &mut [u8])>> = (0..READERS).map(|_| Vec::new()).collect();
        let mut rest = self.staged.as_mut_slice();
        for (index, run) in runs.iter().enumerate() {
            let (chunk, after) =
                rest.split_at_mut(usize::try_from(run.len).unwrap_or_default().min(rest.len()));
            rest = after;
            if let Some(job) = jobs.get_mut(index % READERS) {
                job.push((run.address, chunk));
            }
        }
        let work = |job: Vec<(u64, &mut [u8])>| {
            job.into_iter().try_for_each(|(address, chunk)| read_memory(pid, address, chunk))
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(move || work(job))).collect();
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for result in results {
            result.map_err(|_| EngineError::Monitor("reader failed".into()))?.map_err(unreadable)?;
        }
        Ok(())
    }

    /// Writes out what was read. The machine runs again.
    pub(super) fn finish(mut self) -> Result<()> {
        self.clear()?;
        let mut at = 0;
        for run in &self.runs {
            let end = at + usize::try_from(run.len).unwrap_or_default();
            let bytes = self.staged.get(at..end).unwrap_or_default();
            at = end;
            self.write(run.offset, bytes)?;
        }
        Ok(())
    }

    /// Frees what the machine has zero memory for. Before anything is written there.
    fn clear(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.cleared, true) {
            return Ok(());
        }
        for Mapping { addresses, offset, .. } in self.mappings.iter().filter(|mapping| mapping.zero) {
            let end = offset + (addresses.end - addresses.start);
            // A hole needs no transaction to become one.
            let data = keiki_sys::sparse::next_data(&self.image, *offset)
                .map_err(EngineError::at("inspect", &self.path))?;
            if let Some(data) = data.filter(|data| *data < end) {
                keiki_sys::files::punch(&self.image, data, end - data)
                    .map_err(EngineError::at("write", &self.path))?;
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        for (zero, span) in spans(bytes) {
            let (start, len) = (offset + span.start as u64, span.len() as u64);
            let done = if zero {
                keiki_sys::files::punch(&self.image, start, len)
            } else {
                self.image.write_all_at(bytes.get(span).unwrap_or_default(), start)
            };
            done.map_err(EngineError::at("write", &self.path))?;
        }
        Ok(())
    }

    fn read(&self, address: u64, chunk: &mut [u8]) -> Result<()> {
        read_memory(self.pid, address, chunk).map_err(unreadable)
    }

    fn scan(&self) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        for mapping in &self.mappings {
            for range in private_pages(&self.pagemap, mapping.addresses.clone()).map_err(unreadable)? {
                let mut address = range.start;
                while address < range.end {
                    let len = CHUNK.min(range.end - address);
                    runs.push(Run {
                        address,
                        offset: address - mapping.addresses.start + mapping.offset,
                        len,
                    });
                    address += len;
                }
            }
        }
        Ok(runs)
    }
}

/// One page of them.
static ZEROES: [u8; 4096] = [0; 4096];

fn unreadable(source: std::io::Error) -> EngineError {
    EngineError::Io { what: "cannot read the memory of the monitor".into(), source }
}

/// Cuts pages into spans to write (false) and spans to free (true).
fn spans(bytes: &[u8]) -> Vec<(bool, Range<usize>)> {
    let page = usize::try_from(PAGE).unwrap_or(1);
    let mut spans: Vec<(bool, Range<usize>)> = Vec::new();
    let mut push = |zero, range: Range<usize>| match spans.last_mut() {
        Some((last, span)) if *last == zero => span.end = range.end,
        _ => spans.push((zero, range)),
    };
    let mut zeroes = 0..0;
    for (index, chunk) in bytes.chunks(page).enumerate() {
        let range = index * page..index * page + chunk.len();
        if ZEROES.get(..chunk.len()) == Some(chunk) {
            zeroes = if zeroes.is_empty() { range } else { zeroes.start..range.end };
            continue;
        }
        if !zeroes.is_empty() {
            push(zeroes.len() as u64 >= MIN_HOLE, std::mem::take(&mut zeroes));
        }
        push(false, range);
    }
    if !zeroes.is_empty() {
        push(zeroes.len() as u64 >= MIN_HOLE, zeroes);
    }
    spans
}

/// Where a monitor has its guest's RAM: parts of the memory image, by device and inode, for the path may be gone;
/// and between them zero memory. In the order of addresses.
pub(super) fn locate(pid: u32, image: &File) -> Result<Vec<Mapping>> {
    let path = PathBuf::from(format!("/proc/{pid}/maps"));
    let lines = maps::of_process(pid).map_err(EngineError::at("read", &path))?;
    let meta = image.metadata().map_err(unreadable)?;
    let device = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    let is_image = |line: &&maps::Mapping| (line.device, line.inode) == (device, meta.ino());
    let wrong = |why: String| EngineError::Monitor(format!("does not run on its memory image: {why}"));
    // The beginning of RAM is always the image's.
    let Some(first) = lines.iter().find(is_image).filter(|line| line.offset == 0) else {
        return Err(wrong("its beginning is not mapped".into()));
    };
    let start = first.addresses.start;
    let end = start.saturating_add(meta.len());
    let mut mappings = Vec::new();
    let mut at = start;
    for line in lines.iter().filter(|line| line.addresses.end > start && line.addresses.start < end) {
        // Mappings next to RAM may have been merged with zero memory in it.
        let addresses = line.addresses.start.max(start)..line.addresses.end.min(end);
        let zero = line.inode == 0;
        let offset = addresses.start - start;
        if addresses.start != at
            || !line.private_writable
            || !(zero || is_image(&line) && line.offset == offset)
        {
            return Err(wrong(format!("something else is at {:#x}", addresses.start)));
        }
        at = addresses.end;
        mappings.push(Mapping { addresses, offset, zero });
    }
    if at == end { Ok(mappings) } else { Err(wrong(format!("it ends {} bytes early", end - at))) }
}

/// Host memory behind a machine. Private and shared are of the guest's RAM; the rest of the monitor counts in
/// the resident and proportional sizes.
pub(super) fn memory_use(pid: u32, base: &Path, guest_bytes: u64) -> Result<MemoryUse> {
    let read = |name: &str| {
        let path = PathBuf::from(format!("/proc/{pid}/{name}"));
        fs::read_to_string(&path).map_err(EngineError::at("read", &path))
    };
    let rollup = read("smaps_rollup")?;
    let smaps = read("smaps")?;
    let source = File::open(base).map_err(EngineError::at("open", base))?;
    let mappings = locate(pid, &source)?;
    let (mut resident, mut private, mut ours) = (0, 0, false);
    for line in smaps.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or_default();
        if let Some((start, _)) = first.split_once('-').filter(|_| !first.ends_with(':')) {
            let start = u64::from_str_radix(start, 16).ok();
            ours = mappings.iter().any(|mapping| Some(mapping.addresses.start) == start);
        } else if ours {
            resident += kib(line, "Rss").unwrap_or(0);
            private += kib(line, "Anonymous").unwrap_or(0);
        }
    }
    let total = |key| kib(&rollup, key).unwrap_or(0);
    Ok(MemoryUse {
        guest_bytes,
        rss_bytes: total("Rss"),
        pss_bytes: total("Pss"),
        private_bytes: private,
        shared_bytes: u64::saturating_sub(resident, private),
    })
}

#[cfg(test)]
mod tests {
    use super::spans;

    #[test]
    fn only_long_runs_of_zero_pages_become_holes() {
        let mut bytes = vec![0; 64 * 4096];
        assert_eq!(spans(&bytes), [(true, 0..64 * 4096)]);
        bytes[4096 * 20] = 1;
        assert_eq!(
            spans(&bytes),
            [(true, 0..20 * 4096), (false, 20 * 4096..21 * 4096), (true, 21 * 4096..64 * 4096)]
        );
        bytes[4096 * 10] = 1;
        bytes[4096 * 63 + 4095] = 1;
        assert_eq!(
            spans(&bytes),
            [(false, 0..21 * 4096), (true, 21 * 4096..63 * 4096), (false, 63 * 4096..64 * 4096)]
        );
        assert!(spans(&[]).is_empty());
    }
}
