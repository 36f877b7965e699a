//! Files of the sandbox, accessed as root. Everything here may block as long as the file system
//! does (a user may have mounted one), so callers run it on threads for blocking work.

use bytes::Bytes;
use keiki_protocol::guest::{Entry, FileChunk, WriteHeader};
use rustix::{
    fs::{AtFlags, CWD, Gid, Mode, OFlags, RenameFlags, Uid},
    io::Errno,
};
use std::{
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// Bytes sent at once.
const PIECE: usize = 64 << 10;
/// Limits of a directory listing: entries, and bytes.
const MAX_ENTRIES: usize = 100_000;
const MAX_LISTING: usize = 12 << 20;
/// Links followed to find the file to replace.
const MAX_LINKS: usize = 16;

/// Why a file operation failed. `Display` is a sentence for users.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The listing does not fit into one answer.
    #[error("{0}: too many entries for one answer")]
    TooLarge(String),
    /// A limit is exceeded.
    #[error("{0}")]
    TooMany(String),
    /// The transfer ended early.
    #[error("the transfer was cut off")]
    CutOff,
    /// The system refused.
    #[error("{path}: {}", describe(.error))]
    System { path: String, error: io::Error },
}

/// Plain words for common errors.
fn describe(error: &io::Error) -> String {
    let words = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => "no such file or directory",
        Some(Errno::EXIST) => "already exists",
        Some(Errno::ACCESS | Errno::PERM) => "not permitted",
        Some(Errno::NOTDIR) => "not a directory",
        Some(Errno::ISDIR) => "is a directory",
        Some(Errno::NOTEMPTY) => "directory not empty",
        Some(Errno::NOSPC | Errno::DQUOT) => "no space left",
        Some(Errno::ROFS) => "read-only file system",
        Some(Errno::NAMETOOLONG) => "name too long",
        Some(Errno::LOOP) => "too many symbolic links",
        Some(Errno::XDEV) => "on another file system",
        Some(Errno::BUSY) => "in use",
        _ => return error.to_string(),
    };
    words.to_owned()
}

/// Adds the path to an error.
trait About<T> {
    fn about(self, path: &Path) -> Result<T, FileError>;
}

impl<T, E: Into<io::Error>> About<T> for Result<T, E> {
    fn about(self, path: &Path) -> Result<T, FileError> {
        self.map_err(|error| FileError::System { path: path.display().to_string(), error: error.into() })
    }
}

/// Checks a path that comes from the node.
pub fn absolute(bytes: &[u8]) -> Result<&Path, FileError> {
    if bytes.first() != Some(&b'/') {
        return Err(FileError::Invalid("the path must be absolute".into()));
    }
    if bytes.contains(&0) {
        return Err(FileError::Invalid("the path contains a zero byte".into()));
    }
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Reads `limit` bytes of a file from `offset`, or to its end if `limit` is 0, in pieces. `send`
/// returns false to stop.
pub fn read(
    path: &Path,
    offset: u64,
    limit: u64,
    mut send: impl FnMut(FileChunk) -> bool,
) -> Result<(), FileError> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut file = File::from(rustix::fs::open(path, flags, Mode::empty()).about(path)?);
    let meta = file.metadata().about(path)?;
    regular(path, &meta)?;
    if offset > 0 {
        file.seek(SeekFrom::Start(offset)).about(path)?;
    }
    let (size, mode) = (meta.len(), meta.mode() & 0o7777);
    let mut left = if limit == 0 { u64::MAX } else { limit };
    let mut first = true;
    loop {
        let mut data = vec![0; usize::try_from(left).map_or(PIECE, |left| left.min(PIECE))];
        let got = match data.is_empty() {
            true => 0,
            false => match file.read(&mut data) {
                // Files like /proc/kmsg wait for more data; this ends here.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                got => got.about(path)?,
            },
        };
        if got == 0 && !first {
            return Ok(());
        }
        data.truncate(got);
        left -= got as u64;
        let head = if first { (size, mode) } else { (0, 0) };
        first = false;
        if !send(FileChunk { data: data.into(), size: head.0, mode: head.1 }) {
            return Err(FileError::CutOff);
        }
        if got == 0 {
            return Ok(());
        }
    }
}

fn regular(path: &Path, meta: &Metadata) -> Result<(), FileError> {
    let name = path.display();
    if meta.is_dir() {
        return Err(FileError::Invalid(format!("{name}: is a directory")));
    }
    if !meta.is_file() {
        return Err(FileError::Invalid(format!("{name}: not a regular file")));
    }
    Ok(())
}

/// A file being written next to the one it will replace. If it is dropped before
/// [`Upload::commit`], nothing is left.
#[derive(Debug)]
pub struct Upload {
    file: File,
    temporary: Option<PathBuf>,
    target: PathBuf,
    written: u64,
}

impl Upload {
    /// Begins to write the file that `header` names. Links are followed. The new file gets the mode
    /// and owner of the one it replaces, unless the header sets them.
    pub fn begin(header: &WriteHeader) -> Result<Self, FileError> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let account = match header.user.as_str() {
            "" => None,
            user => Some(crate::users::lookup(user).map_err(|error| FileError::Invalid(error.to_string()))?),
        };
        let owner = account.map(|account| (account.uid, account.gid));
        let (target, old) = destination(absolute(&header.path)?)?;
        let parent = target.parent().unwrap_or(Path::new("/"));
        if header.parents {
            make_parents(parent, 0o755, owner)?;
        }
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temporary = parent.join(format!(".keiki-{}-{number}.tmp", std::process::id()));
        // If it exists, an agent of an earlier boot left it: no other program uses such a name.
        let _ = fs::remove_file(&temporary);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = File::from(rustix::fs::open(&temporary, flags, Mode::RUSR | Mode::WUSR).about(&target)?);
        let upload = Self { file, temporary: Some(temporary), target, written: 0 };
        let owner = owner.or_else(|| old.as_ref().map(|meta| (meta.uid(), meta.gid())));
        if let Some((uid, gid)) = owner {
            rustix::fs::fchown(&upload.file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
                .about(&upload.target)?;
        }
        let mode = match (header.mode & 0o7777, &old) {
            (0, Some(meta)) => meta.mode() & 0o7777,
            (0, None) => 0o644,
            (mode, _) => mode,
        };
        upload.file.set_permissions(fs::Permissions::from_mode(mode)).about(&upload.target)?;
        Ok(upload)
    }

    /// Appends.
    pub fn write(&mut self, data: &Bytes) -> Result<(), FileError> {
        self.file.write_all(data).about(&self.target)?;
        self.written += data.len() as u64;
        Ok(())
    }

    /// Moves the file into place. Returns its size.
    pub fn commit(mut self) -> Result<u64, FileError> {
        if let Some(temporary) = &self.temporary {
            fs::rename(temporary, &self.target).about(&self.target)?;
            self.temporary = None;
        }
        Ok(self.written)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary);
        }
    }
}

/// The file that a write to `path` replaces, at the end of a chain of links.
fn destination(path: &Path) -> Result<(PathBuf, Option<Metadata>), FileError> {
    let mut target = path.to_owned();
    for _ in 0..MAX_LINKS {
        let meta = match fs::symlink_metadata(&target) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if target.as_os_str().as_bytes().ends_with(b"/") {
                    return Err(FileError::Invalid(format!("{}: is a directory", path.display())));
                }
                return Ok((target, None));
            }
            Err(error) => return Err(error).about(path),
        };
        if !meta.is_symlink() {
            regular(path, &meta)?;
            return Ok((target, Some(meta)));
        }
        let link = fs::read_link(&target).about(path)?;
        target = target.parent().unwrap_or(Path::new("/")).join(link);
    }
    Err(Errno::LOOP).about(path)
}

/// Creates missing directories, owned by `owner` if given.
fn make_parents(path: &Path, mode: u32, owner: Option<(u32, u32)>) -> Result<(), FileError> {
    let mut made = PathBuf::new();
    for part in path.components() {
        made.push(part);
        match rustix::fs::mkdir(&made, Mode::from_raw_mode(mode)) {
            Ok(()) => {
                if let Some((uid, gid)) = owner {
                    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                    rustix::fs::chown(&made, Some(uid), Some(gid)).about(&made)?;
                }
            }
            Err(_) if made.is_dir() => {}
            Err(Errno::EXIST) => return Err(Errno::NOTDIR).about(&made),
            Err(error) => return Err(error).about(&made),
        }
    }
    Ok(())
}

/// The entry at `path`. Does not follow a link.
pub fn stat(path: &Path) -> Result<Entry, FileError> {
    let meta = fs::symlink_metadata(path).about(path)?;
    Ok(entry(path, &meta))
}

/// The entries of a directory, sorted by name.
pub fn list(path: &Path) -> Result<Vec<Entry>, FileError> {
    let mut entries = vec![];
    let mut size = 0;
    for found in fs::read_dir(path).about(path)? {
        let found = found.about(path)?;
        let at = found.path();
        let meta = match fs::symlink_metadata(&at) {
            Ok(meta) => meta,
            // Removed since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).about(&at),
        };
        let entry = entry(&at, &meta);
        size += entry.path.len() + entry.name.len() + entry.target.len() + 64;
        entries.push(entry);
        if entries.len() > MAX_ENTRIES || size > MAX_LISTING {
            return Err(FileError::TooLarge(path.display().to_string()));
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn entry(path: &Path, meta: &Metadata) -> Entry {
    let kind = meta.file_type();
    let kind = match () {
        () if kind.is_file() => "file",
        () if kind.is_dir() => "dir",
        () if kind.is_symlink() => "symlink",
        () if kind.is_fifo() => "fifo",
        () if kind.is_socket() => "socket",
        () if kind.is_block_device() => "block",
        () => "char",
    };
    let bytes = |text: &OsStr| Bytes::copy_from_slice(text.as_bytes());
    Entry {
        name: bytes(path.file_name().unwrap_or(path.as_os_str())),
        path: bytes(path.as_os_str()),
        kind: kind.to_owned(),
        size: meta.len(),
        mode: meta.mode() & 0o7777,
        mtime_unix: meta.mtime(),
        uid: meta.uid(),
        gid: meta.gid(),
        target: match meta.is_symlink() {
            true => fs::read_link(path).map(|target| bytes(target.as_os_str())).unwrap_or_default(),
            false => Bytes::new(),
        },
    }
}

/// Creates a directory. With `parents`, also those above it, and it may already exist.
pub fn mkdir(path: &Path, parents: bool, mode: u32) -> Result<(), FileError> {
    let mode = if mode == 0 { 0o755 } else { mode & 0o7777 };
    if parents {
        if let Some(parent) = path.parent() {
            make_parents(parent, 0o755, None)?;
        }
        if path.is_dir() {
            return Ok(());
        }
    }
    rustix::fs::mkdir(path, Mode::RWXU).about(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).about(path)
}

/// Renames a file or directory, and replaces an existing one as rename(2) does.
pub fn rename(from: &Path, to: &Path) -> Result<(), FileError> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::empty()) {
        // The error does not say which of the two paths it is about.
        Err(Errno::NOENT) if fs::symlink_metadata(from).is_ok() => Err(Errno::NOENT).about(to),
        Err(Errno::NOENT) => Err(Errno::NOENT).about(from),
        result => result.about(to),
    }
}

/// Removes a file, a link, an empty directory, or with `recursive` a directory with its contents.
pub fn remove(path: &Path, recursive: bool) -> Result<(), FileError> {
    if path == Path::new("/") {
        return Err(FileError::Invalid("the root directory cannot be removed".into()));
    }
    let meta = fs::symlink_metadata(path).about(path)?;
    match (meta.is_dir(), recursive) {
        (true, true) => fs::remove_dir_all(path),
        (true, false) => fs::remove_dir(path),
        (false, _) => fs::remove_file(path),
    }
    .about(path)
}

/// Sets permission bits. Follows a link.
pub fn chmod(path: &Path, mode: u32) -> Result<(), FileError> {
    rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode & 0o7777), AtFlags::empty()).about(path)
}

/// Creates a symbolic link.
pub fn symlink(target: &[u8], link: &Path) -> Result<(), FileError> {
    if target.is_empty() || target.contains(&0) {
        return Err(FileError::Invalid("the target is empty or contains a zero byte".into()));
    }
    std::os::unix::fs::symlink(OsStr::from_bytes(target), link).about(link)
}

#[cfg(test)]
mod tests {
    use super::{FileError, Upload, list, mkdir, read, remove, rename, stat};
    use bytes::Bytes;
    use keiki_protocol::guest::WriteHeader;
    use std::{
        fs,
        os::unix::{
            ffi::OsStrExt,
            fs::{PermissionsExt, symlink},
        },
        path::Path,
    };

    fn header(path: &Path) -> WriteHeader {
        WriteHeader { path: Bytes::copy_from_slice(path.as_os_str().as_bytes()), ..WriteHeader::default() }
    }

    fn names(dir: &Path) -> Vec<Bytes> {
        list(dir).unwrap().into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn a_write_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("odd \n\u{e9} name");
        let mut upload = Upload::begin(&header(&path)).unwrap();
        upload.write(&Bytes::from_static(b"\0\xff")).unwrap();
        drop(upload);
        assert!(names(dir.path()).is_empty());
        let mut upload = Upload::begin(&header(&path)).unwrap();
        upload.write(&Bytes::from_static(b"\0\xff")).unwrap();
        assert_eq!(upload.commit().unwrap(), 2);
        assert_eq!(fs::read(&path).unwrap(), b"\0\xff");
        assert_eq!(names(dir.path()).len(), 1);
        assert_eq!(stat(&path).unwrap().mode, 0o644);
    }

    #[test]
    fn a_replaced_file_keeps_its_mode_and_a_link_to_it_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
        symlink("file", &link).unwrap();
        let mut upload = Upload::begin(&header(&link)).unwrap();
        upload.write(&Bytes::from_static(b"new")).unwrap();
        upload.commit().unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(stat(&file).unwrap().mode, 0o4751);
        assert_eq!(stat(&link).unwrap().kind, "symlink");
        assert_eq!(stat(&link).unwrap().target, "file");
    }

    #[test]
    fn reads_come_in_pieces_and_honour_offset_and_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let data: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
        fs::write(&path, &data).unwrap();
        let run = |offset, limit| {
            let mut chunks = vec![];
            read(&path, offset, limit, |chunk| {
                chunks.push(chunk);
                true
            })
            .unwrap();
            assert_eq!(chunks[0].size, 200_000);
            assert_eq!(chunks[0].mode, 0o644);
            chunks.iter().map(|chunk| &chunk.data[..]).collect::<Vec<_>>().concat()
        };
        assert_eq!(run(0, 0), data);
        assert_eq!(run(100_000, 5), data[100_000..100_005]);
        assert_eq!(run(100_000, 90_000), data[100_000..190_000]);
        assert_eq!(run(300_000, 0), b"");
        assert!(matches!(read(&path, 0, 0, |_| false), Err(FileError::CutOff)));
    }

    #[test]
    fn errors_are_plain_sentences() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let says = |result: Result<(), FileError>, words: &str| {
            let text = result.unwrap_err().to_string();
            assert!(text.ends_with(words), "{text}");
        };
        fs::write(at("file"), "").unwrap();
        says(read(dir.path(), 0, 0, |_| true), "is a directory");
        says(read(Path::new("/dev/zero"), 0, 0, |_| true), "not a regular file");
        says(stat(&at("none")).map(drop), "no such file or directory");
        says(mkdir(&at("file"), false, 0), "already exists");
        says(mkdir(&at("file/x/y"), true, 0), "not a directory");
        mkdir(&at("a/b/c"), true, 0o700).unwrap();
        mkdir(&at("a/b/c"), true, 0).unwrap();
        assert_eq!(stat(&at("a/b/c")).unwrap().mode, 0o700);
        says(remove(&at("a"), false), "directory not empty");
        says(rename(&at("none"), &at("x")), "none: no such file or directory");
        says(rename(&at("file"), &at("no/x")), "no/x: no such file or directory");
        remove(&at("a"), true).unwrap();
        assert_eq!(names(dir.path()), ["file"]);
    }
}
