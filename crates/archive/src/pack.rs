//! Packs a tree into a stream.

use crate::{About, Counts, Error, MAX_ENTRIES, Result};
use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use tar::{Builder, EntryType, Header, HeaderMode};

/// Packs the file or directory at `source` under the name `top`. Symlinks are not followed. Of
/// other file systems below it, only the mount points are packed: `/` is the disk without `/proc`.
/// Files that are removed meanwhile are left out.
///
/// # Errors
/// If something cannot be read, or `out` cannot be written.
pub fn pack(source: &Path, top: &OsStr, out: impl Write) -> Result<Counts> {
    let mut builder = Builder::new(out);
    builder.mode(HeaderMode::Complete);
    builder.follow_symlinks(false);
    let mut packer = Packer { builder, links: HashMap::new(), counts: Counts::default(), entries: 0 };
    let mut own = None;
    // Directories are in a list, not on the stack: a tree may be deep.
    let mut waiting = vec![(source.to_owned(), PathBuf::from(top))];
    while let Some((at, name)) = waiting.pop() {
        let meta = match fs::symlink_metadata(&at) {
            Ok(meta) => meta,
            // Removed since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound && at != source => continue,
            Err(error) => return Err(error).about(&at),
        };
        packer.entry(&at, &name, &meta)?;
        if meta.is_dir() && *own.get_or_insert(meta.dev()) == meta.dev() {
            let listed = fs::read_dir(&at).and_then(Iterator::collect::<io::Result<Vec<_>>>);
            let mut inside = if_found(listed).about(&at)?.unwrap_or_default();
            inside.sort_by_key(|entry: &fs::DirEntry| std::cmp::Reverse(entry.file_name()));
            waiting.extend(inside.into_iter().map(|entry| (entry.path(), name.join(entry.file_name()))));
        }
    }
    packer.builder.finish().about(source)?;
    Ok(packer.counts)
}

struct Packer<W: Write> {
    builder: Builder<W>,
    /// The first name of each file that has several.
    links: HashMap<(u64, u64), PathBuf>,
    counts: Counts,
    entries: u64,
}

impl<W: Write> Packer<W> {
    fn entry(&mut self, at: &Path, name: &Path, meta: &Metadata) -> Result<()> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(Error::Refused(format!("more than {MAX_ENTRIES} entries")));
        }
        let kind = meta.file_type();
        let mut header = Header::new_gnu();
        header.set_metadata_in_mode(meta, HeaderMode::Complete);
        if kind.is_dir() {
            self.counts.dirs += 1;
            // With a trailing slash, as tar writes it.
            self.builder.append_data(&mut header, name.join(""), io::empty()).about(at)
        } else if kind.is_symlink() {
            let Some(target) = if_found(fs::read_link(at)).about(at)? else { return Ok(()) };
            self.counts.symlinks += 1;
            header.set_size(0);
            self.builder.append_link(&mut header, name, target).about(at)
        } else if kind.is_file() {
            self.file(at, name, meta, header)
        } else {
            debug_assert!(
                kind.is_fifo() || kind.is_socket() || kind.is_block_device() || kind.is_char_device()
            );
            self.counts.skipped += 1;
            Ok(())
        }
    }

    fn file(&mut self, at: &Path, name: &Path, meta: &Metadata, mut header: Header) -> Result<()> {
        let inode = (meta.dev(), meta.ino());
        if let Some(first) = self.links.get(&inode).filter(|_| meta.nlink() > 1) {
            self.counts.files += 1;
            header.set_entry_type(EntryType::Link);
            header.set_size(0);
            let first = first.clone();
            return self.builder.append_link(&mut header, name, first).about(at);
        }
        // It may have been replaced by a pipe, and opening that would wait for a writer.
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
        let open = fs::OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(at);
        let Some(mut file) = if_found(open).about(at)? else { return Ok(()) };
        let meta = file.metadata().about(at)?;
        if !meta.is_file() {
            return Err(io::Error::other("it was replaced while it was read")).about(at);
        }
        if meta.nlink() > 1 {
            self.links.insert((meta.dev(), meta.ino()), name.to_owned());
        }
        self.counts.files += 1;
        self.counts.bytes += meta.len();
        if meta.blocks() * 512 < meta.len() {
            // Holes are not stored.
            return self.builder.append_file(name, &mut file).about(at);
        }
        header.set_metadata_in_mode(&meta, HeaderMode::Complete);
        self.builder.append_data(&mut header, name, Exactly { file, left: meta.len() }).about(at)
    }
}

/// None if the file was removed since it was listed.
fn if_found<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads as many bytes as the header says: a file that grows is cut there, a file that shrinks is
/// an error.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let got = self.file.read(&mut buffer[..most])?;
        if got == 0 {
            return Err(io::Error::other("it shrank while it was read"));
        }
        self.left -= got as u64;
        Ok(got)
    }
}
