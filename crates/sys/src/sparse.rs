//! Copying files with holes: disks are mostly holes, and a copy should be too.

use rustix::fs::SeekFrom;
use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    path::Path,
};

/// Copies `from` to a new file `to`, data only; holes stay holes. The copy is durable when this returns.
///
/// # Errors
/// If either cannot be read or written; `to` may be incomplete then.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    let size = source.metadata()?.len();
    let mut target = File::create_new(to)?;
    target.set_len(size)?;
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole up to the end.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(start))?;
        source.seek(io::SeekFrom::Start(start))?;
        target.seek(io::SeekFrom::Start(start))?;
        let copied = io::copy(&mut Read::by_ref(&mut source).take(end - start), &mut target)?;
        if copied < end - start {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at = end;
    }
    target.flush()?;
    target.sync_all()
}

#[cfg(test)]
mod tests {
    use super::copy;
    use std::{fs, io::Write, os::unix::fs::FileExt, os::unix::fs::MetadataExt};

    #[test]
    fn copies_data_and_keeps_holes() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let mut file = fs::File::create(&from)?;
        file.write_all(b"head")?;
        file.write_all_at(b"middle", 5 << 20)?;
        file.set_len(20 << 20)?;
        copy(&from, &to)?;
        assert_eq!(fs::read(&from)?, fs::read(&to)?);
        assert!(fs::metadata(&to)?.blocks() * 512 < 2 << 20, "the holes were filled");
        assert!(copy(&from, &to).is_err(), "an existing file is not overwritten");
        Ok(())
    }
}
