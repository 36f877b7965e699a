//! Files that share blocks: reflinks, holes, and flushed directories.

use rustix::fs::{FallocateFlags, fallocate, ioctl_ficlone};
use std::{fs::File, io, os::fd::AsFd, path::Path};

/// Gives `to` the contents of `from` (`FICLONE`). They share every block until either is written.
/// Both must be on one file system that supports this.
///
/// # Errors
/// `EOPNOTSUPP` if the file system cannot share blocks.
pub fn reflink(from: impl AsFd, to: impl AsFd) -> io::Result<()> {
    Ok(ioctl_ficlone(to, from)?)
}

/// Frees a range of a file, which then reads as zeroes.
pub fn punch(file: impl AsFd, start: u64, len: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, len)?)
}

/// Flushes a directory. Names created, renamed or removed in it are durable afterwards.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Whether the file system of this directory has reflinks. Tries it with two nameless files.
pub fn has_reflinks(dir: &Path) -> io::Result<bool> {
    use rustix::fs::{Mode, OFlags};
    use std::io::Write;
    let nameless = || -> io::Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?.into())
    };
    let (mut one, two) = (nameless()?, nameless()?);
    one.write_all(&[1; 4096])?;
    Ok(reflink(&one, &two).is_ok())
}

#[cfg(test)]
mod tests {
    use super::{punch, sync_dir};
    use std::{fs::File, io::Write, os::unix::fs::FileExt};

    #[test]
    fn a_hole_reads_as_zeroes_and_keeps_the_size() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let mut file = File::options().create_new(true).read(true).write(true).open(dir.path().join("f"))?;
        file.write_all(&[7; 16384])?;
        punch(&file, 4096, 4096)?;
        let mut page = [1; 4096];
        file.read_exact_at(&mut page, 4096)?;
        assert!(page.iter().all(|byte| *byte == 0));
        file.read_exact_at(&mut page, 8192)?;
        assert!(page.iter().all(|byte| *byte == 7));
        assert_eq!(file.metadata()?.len(), 16384);
        sync_dir(dir.path())
    }
}
