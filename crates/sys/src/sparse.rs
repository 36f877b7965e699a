//! Files with holes. Disks and memory are mostly holes, and a copy of them should be too.

use rustix::fs::SeekFrom;
use std::{
    fs::File,
    io::{self, Read, Seek, Write},
    ops::Range,
    path::Path,
};

/// The parts of a file that have data, in order, as whole blocks of this size; the last one ends
/// with the file. The rest is holes.
pub fn data(file: &File, block: u64) -> io::Result<Vec<Range<u64>>> {
    let size = file.metadata()?.len();
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    // Skips to the next block: a block may have thousands of pieces.
    while let Some(start) = next_data(file, at)? {
        let start = start / block * block;
        at = (start + block).min(size);
        match found.last_mut() {
            Some(last) if last.end == start => last.end = at,
            _ => found.push(start..at),
        }
    }
    Ok(found)
}

/// Where data starts, at or after `at`. None if only holes follow.
pub fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => Ok(Some(start)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Copies the data of `from` to a new file `to`; holes stay holes. The copy is durable when this
/// returns.
///
/// # Errors
/// On error `to` may be incomplete.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    let mut target = File::create_new(to)?;
    target.set_len(source.metadata()?.len())?;
    let mut at = 0;
    while let Some(start) = next_data(&source, at)? {
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
    use super::{copy, data};
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

    #[test]
    fn data_is_told_in_whole_blocks() -> std::io::Result<()> {
        const BLOCK: u64 = 1 << 20;
        let file = tempfile::tempfile()?;
        assert_eq!(data(&file, BLOCK)?, []);
        file.set_len(9 * BLOCK + 4096)?;
        assert_eq!(data(&file, BLOCK)?, []);
        file.write_all_at(b"in a block", 2 * BLOCK + 8192)?;
        file.write_all_at(b"over an edge", 4 * BLOCK - 5)?;
        file.write_all_at(b"end", 9 * BLOCK + 4000)?;
        let wanted = [2 * BLOCK..5 * BLOCK, 9 * BLOCK..9 * BLOCK + 4096];
        assert_eq!(data(&file, BLOCK)?, wanted);
        Ok(())
    }
}
