//! Unpacks a stream into one directory and nowhere else.

use crate::{About, Counts, Error, MAX_ENTRIES, Result};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, RawDir, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, Uid},
    io::Errno,
};
use std::{
    cell::Cell,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Component, Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};
use tar::{Archive, Entry, EntryType};

/// Longest name of an entry, as in Linux.
const MAX_NAME: usize = 4096;
/// Most bytes of headers of one entry, with long names.
const MAX_HEADERS: u64 = 1 << 20;
/// Most bytes of names held in memory.
const MAX_NAMES: usize = 64 << 20;
/// Space left free for others.
const SPARE_BYTES: u64 = 8 << 20;
const PIECE: usize = 64 << 10;
/// Runs of zeroes of this size become holes.
const HOLE: usize = 4096;
/// Path resolution stays inside the destination.
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// What to keep of an archive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Keep numeric owners; otherwise everything belongs to the caller's user.
    pub owners: bool,
    /// Keep set-id and sticky bits.
    pub special_bits: bool,
    /// Remove the first part of every name: the top directory becomes the destination.
    pub strip_top: bool,
}

/// Unpacks a stream into the existing directory `into`. Replaces files of the same name and merges
/// directories.
///
/// # Errors
/// If the archive is refused, does not fit, or a system call fails. Then `into` is unchanged,
/// unless the last step failed: moving complete files into place.
pub fn unpack(input: impl Read, into: &Path, options: Options) -> Result<Counts> {
    unpack_named(input, into, options, MAX_NAMES)
}

/// [`unpack`] with a limit for the bytes of names.
pub(crate) fn unpack_named(
    input: impl Read,
    into: &Path,
    options: Options,
    names_left: usize,
) -> Result<Counts> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let target = rustix::fs::open(into, flags, Mode::empty()).about(into)?;
    let stage = Stage::make(&target, into)?;
    let free = rustix::fs::fstatvfs(&target).about(into)?;
    let size = free.f_blocks.saturating_mul(free.f_frsize);
    let free = free.f_bavail.saturating_mul(free.f_frsize).saturating_sub(SPARE_BYTES);
    let mut unpacker = Unpacker {
        stage: &stage.dir,
        into,
        options,
        free,
        left: free,
        holes_left: size,
        names_left,
        counts: Counts::default(),
        later: Vec::new(),
    };
    let budget = Cell::new(MAX_HEADERS);
    let mut archive = Archive::new(Watched { input, budget: &budget });
    let mut entries = archive.entries().map_err(|error| damaged(&error))?;
    for number in 0.. {
        budget.set(MAX_HEADERS);
        let Some(entry) = entries.next() else { break };
        if number >= MAX_ENTRIES {
            return Err(Error::Refused(format!("more than {MAX_ENTRIES} entries")));
        }
        budget.set(u64::MAX);
        unpacker.entry(entry.map_err(|error| damaged(&error))?)?;
    }
    let device = device(&stage.dir).about(into)?;
    walk(&stage.dir, &target, into, |from, to, name, place| in_the_way(from, to, name, place, device))?;
    walk(&stage.dir, &target, into, |from, to, name, place| {
        rustix::fs::renameat(from, name, to, name).about(place)
    })?;
    unpacker.finish_dirs(&target)?;
    Ok(unpacker.counts)
}

/// Checks what the tar reader does not. The reader accepts a stream that ends between two entries,
/// but an archive ends with a block of zeroes. And it keeps names of any length in memory.
struct Watched<'a, R> {
    input: R,
    /// Bytes that may be read before the next entry begins.
    budget: &'a Cell<u64>,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        if got == 0 && !buffer.is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends in the middle"));
        }
        match self.budget.get().checked_sub(got as u64) {
            Some(left) => self.budget.set(left),
            None => return Err(io::Error::other("the headers of one entry are too long")),
        }
        Ok(got)
    }
}

fn damaged(error: &io::Error) -> Error {
    Error::Damaged(error.to_string())
}

fn refused<T>(name: &Path, why: &str) -> Result<T> {
    let shown: String = name.display().to_string().chars().take(120).collect();
    Err(Error::Refused(format!("{shown:?} {why}")))
}

/// A temporary directory in the destination, removed with its contents when dropped.
struct Stage<'a> {
    target: &'a OwnedFd,
    name: OsString,
    dir: OwnedFd,
}

impl<'a> Stage<'a> {
    fn make(target: &'a OwnedFd, into: &Path) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = OsString::from(format!(".keiki-unpack-{}-{number}", std::process::id()));
        // If it exists, a killed process with this pid left it: no other program uses such a name.
        let _ = remove_all(target.as_fd(), &name);
        rustix::fs::mkdirat(target, &name, Mode::RWXU).about(into)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(target, &name, flags, Mode::empty()).about(into)?;
        Ok(Self { target, name, dir })
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        let _ = remove_all(self.target.as_fd(), &self.name);
    }
}

struct Unpacker<'a> {
    stage: &'a OwnedFd,
    into: &'a Path,
    options: Options,
    free: u64,
    left: u64,
    /// Holes take no space but time, and read as zeroes: no more of them than the size of the file
    /// system.
    holes_left: u64,
    names_left: usize,
    counts: Counts,
    /// Directories get their mode and time when they are complete.
    later: Vec<(PathBuf, Attributes)>,
}

#[derive(Debug, Clone, Copy)]
struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    mtime: i64,
}

impl Unpacker<'_> {
    fn entry(&mut self, mut entry: Entry<'_, impl Read>) -> Result<()> {
        let raw = entry.path_bytes().into_owned();
        // In old archives only the end of the name marks a directory.
        let kind = match entry.header().entry_type() {
            EntryType::Regular if raw.ends_with(b"/") => EntryType::Directory,
            kind => kind,
        };
        if matches!(kind, EntryType::XGlobalHeader | EntryType::XHeader) {
            return Ok(());
        }
        let Some(name) = self.inner_name(&raw)? else {
            return self.top(&entry, kind, &raw);
        };
        let attributes = self.attributes(&entry)?;
        let (parent, last) = self.parent(&name)?;
        // Of a directory the whole name is kept; of others the last part, when their directory is
        // listed.
        self.remember(if kind == EntryType::Directory { name.as_os_str() } else { last })?;
        match kind {
            EntryType::Directory => {
                match rustix::fs::mkdirat(&parent, last, Mode::RWXU) {
                    Ok(()) => {}
                    Err(Errno::EXIST) if is_dir(&parent, last) => {}
                    Err(Errno::EXIST) => return refused(&name, "appears twice, and once not as a directory"),
                    Err(error) => return Err(error).about(&self.at(&name)),
                }
                self.counts.dirs += 1;
                self.later.push((name, attributes));
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                clear(&parent, last).about(&self.at(&name))?;
                self.file(&mut entry, &parent, last, &name, attributes)?;
                self.counts.files += 1;
            }
            EntryType::Symlink => {
                let target = link_target(&entry, &name)?;
                clear(&parent, last).about(&self.at(&name))?;
                rustix::fs::symlinkat(OsStr::from_bytes(&target), &parent, last).about(&self.at(&name))?;
                self.own(&parent, last, attributes).about(&self.at(&name))?;
                self.counts.symlinks += 1;
            }
            EntryType::Link => {
                let target = link_target(&entry, &name)?;
                let Some(first) = self.inner_name(&target)? else {
                    return refused(&name, "is a hard link to a directory");
                };
                let (first_parent, first_last) = self.parent(&first)?;
                let found = rustix::fs::statat(&first_parent, first_last, AtFlags::SYMLINK_NOFOLLOW);
                if !found.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_file()) {
                    return refused(
                        &name,
                        "is a hard link to something that is not an earlier file of the archive",
                    );
                }
                clear(&parent, last).about(&self.at(&name))?;
                rustix::fs::linkat(&first_parent, first_last, &parent, last, AtFlags::empty())
                    .about(&self.at(&name))?;
                self.counts.files += 1;
            }
            EntryType::Char | EntryType::Block => return refused(&name, "is a device"),
            EntryType::Fifo => return refused(&name, "is a pipe"),
            _ => return refused(&name, "has an unknown type"),
        }
        Ok(())
    }

    /// The name of an entry below the destination. None for the top itself.
    fn inner_name(&self, raw: &[u8]) -> Result<Option<PathBuf>> {
        let path = Path::new(OsStr::from_bytes(raw));
        if raw.len() > MAX_NAME {
            return refused(path, "has a name that is too long");
        }
        if raw.contains(&0) {
            return refused(path, "has a name with a zero byte");
        }
        let mut name = PathBuf::new();
        for part in path.components() {
            match part {
                Component::Normal(part) => name.push(part),
                Component::CurDir => {}
                Component::ParentDir => return refused(path, "leads out of the archive with .."),
                Component::RootDir | Component::Prefix(_) => return refused(path, "is an absolute path"),
            }
        }
        if self.options.strip_top {
            name = name.components().skip(1).collect();
        }
        Ok((name != Path::new("")).then_some(name))
    }

    /// The destination itself. It keeps its attributes, unless it is the top of the archive.
    fn top(&mut self, entry: &Entry<'_, impl Read>, kind: EntryType, raw: &[u8]) -> Result<()> {
        if kind != EntryType::Directory {
            return refused(Path::new(OsStr::from_bytes(raw)), "must be a directory");
        }
        if self.options.strip_top {
            let attributes = self.attributes(entry)?;
            self.counts.dirs += 1;
            self.later.push((PathBuf::new(), attributes));
        }
        Ok(())
    }

    fn attributes(&self, entry: &Entry<'_, impl Read>) -> Result<Attributes> {
        let header = entry.header();
        let mask = if self.options.special_bits { 0o7777 } else { 0o777 };
        let id = |value: io::Result<u64>| -> Result<u32> {
            let value = value.map_err(|error| damaged(&error))?;
            u32::try_from(value).map_err(|_| Error::Damaged("an owner is out of range".into()))
        };
        let (uid, gid) = match self.options.owners {
            true => (id(header.uid())?, id(header.gid())?),
            false => (0, 0),
        };
        Ok(Attributes {
            mode: header.mode().map_err(|error| damaged(&error))? & mask,
            uid,
            gid,
            // A missing time is no reason to lose the file.
            mtime: header.mtime().ok().and_then(|seconds| i64::try_from(seconds).ok()).unwrap_or(0),
        })
    }

    fn at(&self, name: &Path) -> PathBuf {
        self.into.join(name)
    }

    /// The parent directory of an entry, created if the archive has none.
    fn parent<'n>(&mut self, name: &'n Path) -> Result<(OwnedFd, &'n OsStr)> {
        let (above, last) = split(name);
        match open_beneath(self.stage, above) {
            Err(Errno::NOENT) => {
                let mut made = PathBuf::new();
                for part in above.components() {
                    made.push(part);
                    self.remember(made.as_os_str())?;
                    let (dir, last) = split(&made);
                    let dir = open_beneath(self.stage, dir).about(&self.at(&made))?;
                    match rustix::fs::mkdirat(&dir, last, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error).about(&self.at(&made)),
                    }
                }
                match open_beneath(self.stage, above) {
                    Ok(dir) => Ok((dir, last)),
                    Err(error) => self.no_parent(name, error),
                }
            }
            Ok(dir) => Ok((dir, last)),
            Err(error) => self.no_parent(name, error),
        }
    }

    /// Counts the bytes of a name that is held in memory.
    fn remember(&mut self, name: &OsStr) -> Result<()> {
        match self.names_left.checked_sub(name.len()) {
            Some(left) => self.names_left = left,
            None => return refused(Path::new(name), "has a name that exceeds the limit for all names"),
        }
        Ok(())
    }

    fn no_parent<T>(&self, name: &Path, error: Errno) -> Result<T> {
        match error {
            Errno::LOOP => refused(name, "goes through a symbolic link"),
            Errno::NOTDIR => refused(name, "goes through something that is not a directory"),
            Errno::XDEV => refused(name, "leads out of the archive"),
            error => Err(error).about(&self.at(name)),
        }
    }

    fn file(
        &mut self,
        entry: &mut Entry<'_, impl Read>,
        parent: &OwnedFd,
        last: &OsStr,
        name: &Path,
        attributes: Attributes,
    ) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let at = self.at(name);
        let file = rustix::fs::openat(parent, last, flags, Mode::RUSR | Mode::WUSR).about(&at)?;
        let mut file = File::from(file);
        let mut buffer = vec![0; PIECE];
        let mut size = 0u64;
        loop {
            let got = fill(entry, &mut buffer).map_err(|error| damaged(&error))?;
            if got == 0 {
                break;
            }
            for block in buffer[..got].chunks(HOLE) {
                size += block.len() as u64;
                if block.iter().all(|&byte| byte == 0) {
                    let Some(left) = self.holes_left.checked_sub(block.len() as u64) else {
                        return refused(name, "has larger holes than the file system");
                    };
                    self.holes_left = left;
                    file.seek(SeekFrom::Current(block.len() as i64)).about(&at)?;
                } else {
                    let room = self.left.checked_sub(block.len() as u64);
                    self.left = room.ok_or(Error::NoRoom { free_mib: self.free >> 20 })?;
                    file.write_all(block).about(&at)?;
                }
            }
        }
        file.set_len(size).about(&at)?;
        self.counts.bytes += size;
        if self.options.owners {
            rustix::fs::fchown(
                &file,
                Some(Uid::from_raw(attributes.uid)),
                Some(Gid::from_raw(attributes.gid)),
            )
            .about(&at)?;
        }
        rustix::fs::fchmod(&file, Mode::from_raw_mode(attributes.mode)).about(&at)?;
        rustix::fs::futimens(&file, &times(attributes.mtime)).about(&at)
    }

    fn own(&self, parent: &OwnedFd, last: &OsStr, attributes: Attributes) -> rustix::io::Result<()> {
        if !self.options.owners {
            return Ok(());
        }
        let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
        rustix::fs::chownat(parent, last, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Sets the attributes of directories, innermost first: they must be writable until everything
    /// is in place.
    fn finish_dirs(&mut self, target: &OwnedFd) -> Result<()> {
        for (name, attributes) in std::mem::take(&mut self.later).into_iter().rev() {
            let dir = match open_beneath(target, &name) {
                Ok(dir) => dir,
                Err(error) => return self.no_parent(&name, error),
            };
            let at = self.at(&name);
            if self.options.owners {
                let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
                rustix::fs::fchown(&dir, Some(uid), Some(gid)).about(&at)?;
            }
            rustix::fs::fchmod(&dir, Mode::from_raw_mode(attributes.mode)).about(&at)?;
            rustix::fs::futimens(&dir, &times(attributes.mtime)).about(&at)?;
        }
        Ok(())
    }
}

fn times(mtime: i64) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: mtime, tv_nsec: 0 },
    }
}

fn link_target(entry: &Entry<'_, impl Read>, name: &Path) -> Result<Vec<u8>> {
    match entry.link_name_bytes() {
        Some(target) if !target.is_empty() && target.len() <= MAX_NAME && !target.contains(&0) => {
            Ok(target.into_owned())
        }
        _ => refused(name, "is a link without a target"),
    }
}

/// Reads until the buffer is full or the entry ends.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(got) => filled += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn open_beneath(root: impl AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let path = if path == Path::new("") { Path::new(".") } else { path };
    rustix::fs::openat2(root, path, flags, Mode::empty(), BENEATH)
}

fn is_dir(parent: impl AsFd, name: &OsStr) -> bool {
    let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir())
}

/// Removes an earlier entry of the same name.
fn clear(parent: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        done => done,
    }
}

/// Names in a directory, without `.` and `..`.
fn names(dir: impl AsFd) -> rustix::io::Result<Vec<OsString>> {
    let mut buffer = vec![MaybeUninit::uninit(); 16 << 10];
    // Its own descriptor: reading moves the offset.
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(dir, ".", flags, Mode::empty())?;
    let mut entries = RawDir::new(dir, &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    Ok(names)
}

/// Removes a directory with everything below it. Links are not followed. One directory is open at a
/// time and each is listed once: a tree may be deep and wide.
fn remove_all(parent: impl AsFd, name: &OsStr) -> rustix::io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let _ = rustix::fs::chmodat(&parent, name, Mode::RWXU, AtFlags::empty());
    let root = rustix::fs::openat(&parent, name, flags, Mode::empty())?;
    let mut dirs = vec![PathBuf::new()];
    let mut at = 0;
    while let Some(path) = dirs.get(at).cloned() {
        let dir = open_beneath(&root, &path)?;
        for name in names(&dir)? {
            if is_dir(&dir, &name) {
                let _ = rustix::fs::chmodat(&dir, &name, Mode::RWXU, AtFlags::empty());
                dirs.push(path.join(name));
            } else {
                rustix::fs::unlinkat(&dir, &name, AtFlags::empty())?;
            }
        }
        at += 1;
    }
    for path in dirs.iter().skip(1).rev() {
        let (above, last) = split(path);
        rustix::fs::unlinkat(open_beneath(&root, above)?, last, AtFlags::REMOVEDIR)?;
    }
    rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

/// The parent of a relative path, and its last part.
fn split(path: &Path) -> (&Path, &OsStr) {
    (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default())
}

/// Calls `work` for every name in `from` that is not a directory in both trees. Links are not
/// followed, and at most two directories are open at a time.
fn walk(
    from: &OwnedFd,
    to: &OwnedFd,
    into: &Path,
    work: impl Fn(&OwnedFd, &OwnedFd, &OsStr, &Path) -> Result<()>,
) -> Result<()> {
    let mut waiting = vec![PathBuf::new()];
    while let Some(path) = waiting.pop() {
        let at = into.join(&path);
        let inner = open_beneath(from, &path).about(&at)?;
        let there = open_beneath(to, &path).about(&at)?;
        for name in names(&inner).about(&at)? {
            if is_dir(&inner, &name) && is_dir(&there, &name) {
                waiting.push(path.join(name));
            } else {
                work(&inner, &there, &name, &at.join(&name))?;
            }
        }
    }
    Ok(())
}

/// Refuses a name that a rename could not replace, or that is on another file system.
fn in_the_way(from: &OwnedFd, to: &OwnedFd, name: &OsStr, place: &Path, own: u64) -> Result<()> {
    let there = rustix::fs::statat(to, name, AtFlags::SYMLINK_NOFOLLOW);
    if is_dir(to, name) {
        return refused(place, "is in the way: it is a directory here");
    }
    if there.is_ok() && is_dir(from, name) {
        return refused(place, "is in the way: it is not a directory here");
    }
    if device(to).about(place)? != own {
        return refused(place, "is on another file system: unpack into that one");
    }
    Ok(())
}

fn device(of: &OwnedFd) -> rustix::io::Result<u64> {
    rustix::fs::fstat(of).map(|stat| stat.st_dev)
}
