//! A disk: a chain of layers, each an open file.
//!
//! ```text
//!   top      qcow2, writable, this machine's own       freeze: switch_top(new)      new     empty, writable
//!   layer n  qcow2, immutable, shared by relatives     ───────────────────────>     top     immutable from now on
//!   ...                                                                             layer n
//!   bottom   raw or qcow2                                                           ...
//! ```
//!
//! `imago` reads and writes the format. This module adds three rules: every file arrives open;
//! headers are checked first ([`keiki_snapshot::layer`]) and may name no other file; and a
//! definition of "flushed".
//!
//! **Flushed data is in the files.** [`Disk::flush`] writes the metadata of the top (data is
//! written through at once) and syncs it, together with every earlier top that has not been synced
//! yet. [`Disk::switch_top`] only writes metadata. That is enough for relatives on this host, which
//! open the layer through the same page cache. So a freeze costs no sync if [`Disk::flush`] ran
//! before it, and little otherwise.
//!
//! A top is never opened for writing again after a freeze or a crash: each machine starts with an
//! empty one. So a crash may leave wrong reference counts. The mappings of flushed data matter, and
//! they are in the file before a flush is acknowledged.
//!
//! **fork**: an open disk does not survive one. It has no thread, and its locks are free while the
//! event loop is between two requests. A zygote closes the files, and a thawed machine opens its
//! own disk from its descriptors.

use imago::{
    DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, ShallowMapping,
    file::File as Storage,
    io_buffers::{IoVector, IoVectorMut},
    qcow2::Qcow2,
    raw::Raw,
};
use keiki_snapshot::layer::{CLUSTER_BITS, HEADER_LEN, check_header, disk_bytes, least_bytes};
use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};
use vm_memory::VolatileSlice;

pub use keiki_snapshot::Format;

/// Most layers of a disk. The engine keeps chains much shorter. Their descriptors fit into one
/// message of a socket.
pub const MAX_LAYERS: usize = 240;
pub const CLUSTER: u64 = 1 << CLUSTER_BITS;

type Open = FormatAccess<Storage>;

/// A read-only layer.
#[derive(Debug)]
pub struct Layer {
    pub format: Format,
    pub file: File,
}

/// Why a disk cannot be opened or changed.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("disk layer {index} {why}")]
    Layer {
        /// Counted from the bottom; the top is last.
        index: usize,
        why: &'static str,
    },
    #[error("disk layer {index} cannot be opened")]
    Open {
        /// Counted from the bottom; the top is last.
        index: usize,
        source: io::Error,
    },
    #[error("a disk has 1 to {MAX_LAYERS} layers, not {0}")]
    Count(usize),
    #[error("a disk without a writable layer has no layer to switch to")]
    ReadOnly,
    #[error("the metadata of the top layer cannot be written")]
    Flush(#[source] io::Error),
}

#[derive(Debug)]
pub struct Disk {
    /// None only while a method replaces it.
    chain: Option<Chain>,
    bytes: u64,
    lowers: usize,
    /// Earlier tops that have not been synced yet.
    unsynced: Vec<Arc<Open>>,
    /// The top has been written since its last sync.
    dirty: bool,
    durable: Durable,
}

/// Remembers a failed sync. The kernel reports a page that it could not write only once, at the
/// next sync, which may be that of a freeze. So one failure makes all later syncs fail, and the
/// guest notices.
#[derive(Debug, Default)]
struct Durable {
    lost: bool,
}

impl Durable {
    fn sync(&mut self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.lost {
            return Err(io::Error::other("an earlier sync failed and its data is lost"));
        }
        sync().inspect_err(|_| self.lost = true)
    }
}

/// An open top that has nothing below it yet.
#[derive(Debug)]
pub struct Top {
    overlay: Qcow2<Storage, Arc<Open>>,
    /// To open the top again over other layers.
    file: File,
}

impl Top {
    fn into_chain(self) -> Chain {
        Chain::Writable(FormatAccess::new(self.overlay), self.file)
    }
}

#[derive(Debug)]
enum Chain {
    ReadOnly(Arc<Open>),
    /// The top, and a copy of its descriptor to open it again over other layers.
    Writable(Open, File),
}

impl Disk {
    /// Opens a disk. `lower` comes bottom first. Without a top the disk is read-only.
    pub fn open(lower: Vec<Layer>, top: Option<File>) -> Result<Self, DiskError> {
        let count = lower.len() + usize::from(top.is_some());
        if count == 0 || count > MAX_LAYERS {
            return Err(DiskError::Count(count));
        }
        let lowers = lower.len();
        let bytes = size(&lower, top.as_ref())?;
        let below = open_lower(lower, bytes)?;
        let chain = match (top, below) {
            (Some(top), below) => open_top(top, lowers, bytes, below)?.into_chain(),
            (None, Some(below)) => Chain::ReadOnly(below),
            (None, None) => return Err(DiskError::Count(0)),
        };
        Ok(Self {
            chain: Some(chain),
            bytes,
            lowers,
            unsynced: Vec::new(),
            dirty: false,
            durable: Durable::default(),
        })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn is_read_only(&self) -> bool {
        !matches!(self.chain, Some(Chain::Writable(..)))
    }

    pub fn lower_layers(&self) -> usize {
        self.lowers
    }

    /// Fills `into` from `offset` on.
    pub fn read(&self, into: &[VolatileSlice<'_>], offset: u64) -> io::Result<()> {
        let (vector, _guard) = IoVectorMut::from_volatile_slice(into);
        match self.chain.as_ref().ok_or_else(broken)? {
            Chain::ReadOnly(open) => open.readv(vector, offset),
            Chain::Writable(top, _) => top.readv(vector, offset),
        }
    }

    /// Writes all of `from` from `offset` on.
    pub fn write(&mut self, from: &[VolatileSlice<'_>], offset: u64) -> io::Result<()> {
        let (vector, _guard) = IoVector::from_volatile_slice(from);
        self.top()?.writev(vector, offset)
    }

    /// Makes a range read as zeroes. With `unmap` its space may be freed.
    pub fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        if unmap {
            self.discard(offset, len)?;
        }
        self.top()?.write_zeroes(offset, len)
    }

    /// Frees the space of a range, whole clusters only.
    pub fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len);
        // The last cluster of a disk may be cut short by its end.
        let end = if end == self.bytes { end } else { end / CLUSTER * CLUSTER };
        let start = offset.div_ceil(CLUSTER) * CLUSTER;
        if start >= end {
            return Ok(());
        }
        self.punch(start, end)?;
        self.top()?.discard_to_zero(start, end - start)
    }

    /// Gives the space of whole clusters back to the host. The library would keep them for later
    /// writes. This must come before the library frees them: afterwards they may hold other data.
    fn punch(&self, mut offset: u64, end: u64) -> io::Result<()> {
        let Some(Chain::Writable(top, file)) = &self.chain else {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        };
        while offset < end {
            let (mapping, len) = top.get_shallow_mapping(offset, end - offset)?;
            if let ShallowMapping::Raw { offset, writable: true, .. } = mapping {
                // A file system without holes keeps the space.
                let _ = keiki_sys::files::punch(file, offset, len);
            }
            if len == 0 {
                break;
            }
            offset += len;
        }
        Ok(())
    }

    /// Makes everything written so far durable.
    pub fn flush(&mut self) -> io::Result<()> {
        if let (true, Some(Chain::Writable(top, _))) = (self.dirty, &self.chain) {
            top.flush()?;
            self.durable.sync(|| top.sync())?;
            self.dirty = false;
        }
        while let Some(earlier) = self.unsynced.last() {
            self.durable.sync(|| earlier.sync())?;
            self.unsynced.pop();
        }
        Ok(())
    }

    /// Opens the next top before [`Disk::switch_top`], so that any fault of it is found here.
    pub fn prepare_top(&self, new: File) -> Result<Top, DiskError> {
        let index = self.lowers + 1;
        if self.is_read_only() {
            return Err(DiskError::ReadOnly);
        }
        if index >= MAX_LAYERS {
            return Err(DiskError::Count(index + 1));
        }
        open_top(new, index, self.bytes, None)
    }

    /// Writes the metadata of the top to its file, so that other processes that open it see it. If
    /// nothing is written meanwhile, [`Disk::switch_top`] then does nothing that could fail.
    pub fn finish_top(&self) -> Result<(), DiskError> {
        match &self.chain {
            Some(Chain::Writable(top, _)) => top.flush().map_err(DiskError::Flush),
            _ => Err(DiskError::ReadOnly),
        }
    }

    /// Makes the top a lower layer and `new` the top. On error nothing has changed.
    pub fn switch_top(&mut self, mut new: Top) -> Result<(), DiskError> {
        self.finish_top()?;
        let Some(Chain::Writable(old, _)) = self.chain.take() else { return Err(DiskError::ReadOnly) };
        let old = Arc::new(old);
        new.overlay.set_backing(Some(Arc::clone(&old)));
        self.chain = Some(new.into_chain());
        self.lowers += 1;
        if std::mem::take(&mut self.dirty) {
            self.unsynced.push(old);
        }
        Ok(())
    }

    /// Replaces the layers below the top with a flattened chain of the same contents.
    pub fn rebase(&mut self, lower: Vec<Layer>) -> Result<(), DiskError> {
        let count = lower.len();
        if count == 0 || count >= MAX_LAYERS {
            return Err(DiskError::Count(count));
        }
        let below = open_lower(lower, self.bytes)?;
        let Some(Chain::Writable(top, file)) = &self.chain else { return Err(DiskError::ReadOnly) };
        top.flush().map_err(DiskError::Flush)?;
        let file = file.try_clone().map_err(|source| DiskError::Open { index: count, source })?;
        // Both have the same file open for a moment, but the old one has nothing left to write.
        let chain = open_top(file, count, self.bytes, below)?.into_chain();
        self.chain = Some(chain);
        self.lowers = count;
        Ok(())
    }

    fn top(&mut self) -> io::Result<&mut Open> {
        match &mut self.chain {
            Some(Chain::Writable(top, _)) => {
                self.dirty = true;
                Ok(top)
            }
            _ => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
        }
    }
}

/// Size of a disk, from its top or else its uppermost layer.
fn size(lower: &[Layer], top: Option<&File>) -> Result<u64, DiskError> {
    let (file, index) = match (top, lower.last()) {
        (Some(top), _) => (top, lower.len()),
        (None, Some(Layer { format: Format::Qcow2, file })) => (file, lower.len() - 1),
        (None, Some(Layer { format: Format::Raw, file })) => {
            let meta = file.metadata().map_err(|source| DiskError::Open { index: 0, source })?;
            return Ok(meta.len() / 512 * 512);
        }
        (None, None) => return Err(DiskError::Count(0)),
    };
    Ok(disk_bytes(&header(file, index)?))
}

fn open_lower(lower: Vec<Layer>, bytes: u64) -> Result<Option<Arc<Open>>, DiskError> {
    let mut below: Option<Arc<Open>> = None;
    for (index, layer) in lower.into_iter().enumerate() {
        let open = match layer.format {
            Format::Raw if below.is_some() => {
                return Err(DiskError::Layer { index, why: "is raw, which only the bottom layer may be" });
            }
            Format::Raw => storage(layer.file)
                .and_then(|file| Raw::builder(file).open(DenyImplicitOpenGate::default()))
                .map(FormatAccess::new)
                .map_err(|source| DiskError::Open { index, source })?,
            Format::Qcow2 => {
                check_overlay(&layer.file, index, bytes)?;
                FormatAccess::new(open_overlay(layer.file, index, below.take(), false)?)
            }
        };
        if open.size() > bytes {
            return Err(DiskError::Layer { index, why: "exceeds the disk" });
        }
        below = Some(Arc::new(open));
    }
    Ok(below)
}

fn open_top(file: File, index: usize, bytes: u64, below: Option<Arc<Open>>) -> Result<Top, DiskError> {
    check_top(&file, index, bytes)?;
    let copy = file.try_clone().map_err(|source| DiskError::Open { index, source })?;
    Ok(Top { overlay: open_overlay(file, index, below, true)?, file: copy })
}

fn open_overlay(
    file: File,
    index: usize,
    below: Option<Arc<Open>>,
    write: bool,
) -> Result<Qcow2<Storage, Arc<Open>>, DiskError> {
    storage(file)
        .and_then(|file| {
            Qcow2::<Storage, Arc<Open>>::builder(file)
                .backing(below)
                .data_file(None)
                .write(write)
                .open(DenyImplicitOpenGate::default())
        })
        .map_err(|source| DiskError::Open { index, source })
}

fn check_overlay(file: &File, index: usize, bytes: u64) -> Result<(), DiskError> {
    check_header(&header(file, index)?, bytes).map_err(|why| DiskError::Layer { index, why })
}

/// Also checks that the tables of a top exist, because it is written.
fn check_top(file: &File, index: usize, bytes: u64) -> Result<(), DiskError> {
    check_overlay(file, index, bytes)?;
    let len = file.metadata().map_err(|source| DiskError::Open { index, source })?.len();
    if len < least_bytes(&header(file, index)?) {
        return Err(DiskError::Layer { index, why: "is truncated" });
    }
    Ok(())
}

fn header(file: &File, index: usize) -> Result<[u8; HEADER_LEN], DiskError> {
    let mut header = [0; HEADER_LEN];
    file.read_exact_at(&mut header, 0).map_err(|source| DiskError::Open { index, source })?;
    Ok(header)
}

fn storage(file: File) -> io::Result<Storage> {
    Storage::try_from(file)
}

fn broken() -> io::Error {
    io::Error::other("the disk has no layers")
}

#[cfg(test)]
mod tests {
    use super::Durable;

    #[test]
    fn a_sync_that_failed_is_not_forgotten() {
        let mut durable = Durable::default();
        assert!(durable.sync(|| Ok(())).is_ok());
        assert!(durable.sync(|| Err(std::io::ErrorKind::StorageFull.into())).is_err());
        assert!(durable.sync(|| Ok(())).is_err());
    }
}
