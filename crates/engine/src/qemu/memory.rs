//! Copying what a guest's RAM has that its memory image does not.
//!
//! The machine must stand still while its pages are read, and reading is all that happens then: pages go
//! into a buffer that was made, and touched, before. Looking for zeroes, writing to the file, and freeing the
//! blocks of pages that became zero come after the vCPUs run again. Without the buffer, or beyond its bound,
//! pages are written while the machine stands: slower, but right.

use crate::{EngineError, Result};
use keiki_sys::{
    host::kib,
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
#[derive(Debug, Clone)]
pub(super) struct Mapping {
    pub(super) addresses: Range<u64>,
    pub(super) offset: u64,
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
    mappings: Vec<Mapping>,
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
        let mut copier =
            Self { pid, pagemap, mappings, image, path: path.into(), staged: Vec::new(), runs: Vec::new() };
        let expected: u64 = copier.scan()?.iter().map(|run| run.len).sum();
        let room = (expected + expected / 8 + HEADROOM).min(MAX_STAGED);
        // Not zeroes: those would be the kernel's zero page until the pause touches them.
        copier.staged = vec![1; usize::try_from(room).unwrap_or_default()];
        Ok(copier)
    }

    /// Reads the private pages. The machine stands still. Their number of bytes.
    pub(super) fn take(&mut self) -> Result<u64> {
        let mut runs = self.scan()?;
        let total = runs.iter().map(|run| run.len).sum();
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
        let mut buffer = vec![0; usize::try_from(CHUNK).unwrap_or_default()];
        for run in runs {
            let chunk = buffer.get_mut(..usize::try_from(run.len).unwrap_or_default()).unwrap_or_default();
            self.read(run.address, chunk)?;
            self.image.write_all_at(chunk, run.offset).map_err(EngineError::at("write", &self.path))?;
        }
        Ok(total)
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
    pub(super) fn finish(self) -> Result<()> {
        let mut at = 0;
        for run in &self.runs {
            let end = at + usize::try_from(run.len).unwrap_or_default();
            let bytes = self.staged.get(at..end).unwrap_or_default();
            at = end;
            self.write(run.offset, bytes)?;
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

/// Where a monitor has mapped its memory image: by device and inode, for the path may be gone.
pub(super) fn locate(pid: u32, image: &File) -> Result<Vec<Mapping>> {
    let path = PathBuf::from(format!("/proc/{pid}/maps"));
    let text = fs::read_to_string(&path).map_err(EngineError::at("read", &path))?;
    let meta = image.metadata().map_err(unreadable)?;
    let dev = meta.dev();
    let dev = format!("{:02x}:{:02x}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let inode = meta.ino().to_string();
    let mut mappings = Vec::new();
    for line in text.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(addresses), Some(flags), Some(offset), Some(on), Some(ino)) =
            (fields.next(), fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if on != dev || ino != inode || !flags.contains('w') {
            continue;
        }
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let ends = addresses.split_once('-').and_then(|(start, end)| Some(hex(start)?..hex(end)?));
        if let (Some(addresses), Some(offset)) = (ends, hex(offset)) {
            mappings.push(Mapping { addresses, offset });
        }
    }
    let mapped: u64 = mappings.iter().map(|mapping| mapping.addresses.end - mapping.addresses.start).sum();
    if mapped == meta.len() {
        return Ok(mappings);
    }
    Err(EngineError::Monitor(format!("maps {mapped} bytes of its memory image, which has {}", meta.len())))
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
