//! Writes `newc` archives, which the kernel unpacks as its initial RAM file system.
//!
//! Supports directories and regular files only, all owned by root and with the same time, so that
//! the same contents always give the same bytes.

use std::io::{self, Write};

const MAGIC: &str = "070701";
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const TRAILER: &str = "TRAILER!!!";

/// An archive being written.
pub struct Archive<W: Write> {
    out: W,
    written: u64,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// Starts an archive.
    pub fn new(out: W) -> Self {
        Self { out, written: 0, inode: 0 }
    }

    /// Adds a directory. Parents come before their contents.
    ///
    /// # Errors
    /// If the output fails or the name is not valid.
    pub fn directory(&mut self, name: &str, mode: u32) -> io::Result<()> {
        self.entry(name, DIRECTORY | mode, 2, &[])
    }

    /// Adds a regular file.
    ///
    /// # Errors
    /// As [`Archive::directory`], and if the file has 4 GiB or more.
    pub fn file(&mut self, name: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(name, REGULAR | mode, 1, data)
    }

    /// Ends the archive, flushes the output and returns it.
    ///
    /// # Errors
    /// If the output fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.header(TRAILER, 0, 1, 0)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, links: u32, data: &[u8]) -> io::Result<()> {
        if name.is_empty() || name.starts_with('/') || name.contains('\0') || name == TRAILER {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("not a valid name in an archive: {name:?}"),
            ));
        }
        let size = u32::try_from(data.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        self.inode += 1;
        self.header(name, mode, links, size)?;
        self.write(data)?;
        self.pad()
    }

    fn header(&mut self, name: &str, mode: u32, links: u32, size: u32) -> io::Result<()> {
        let name_size =
            u32::try_from(name.len() + 1).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // inode, mode, uid, gid, links, mtime, size, device (4), length of the name, checksum
        // (unused)
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from(MAGIC);
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        self.write(header.as_bytes())?;
        self.write(name.as_bytes())?;
        self.write(&[0])?;
        self.pad()
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        self.written += data.len() as u64;
        self.out.write_all(data)
    }

    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(4) - self.written;
        self.write(&[0; 4][..missing as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        process::{Command, Stdio},
    };

    fn sample() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new());
        archive.directory("keiki", 0o755).unwrap();
        archive.directory("keiki/modules.d", 0o755).unwrap();
        archive.file("init", 0o755, b"#!/bin/true\n").unwrap();
        for size in 0..9 {
            archive
                .file(&format!("keiki/modules.d/{}", "x".repeat(size + 1)), 0o640, &vec![b'a'; size])
                .unwrap();
        }
        archive.finish().unwrap()
    }

    #[test]
    fn the_system_reads_what_we_write() {
        if Command::new("cpio").arg("--version").stdout(Stdio::null()).status().is_err() {
            keiki_testing::skip("cpio", "cpio is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("archive");
        fs::write(&path, sample()).unwrap();
        let status = Command::new("cpio")
            .args(["--extract", "--quiet"])
            .current_dir(dir.path())
            .stdin(fs::File::open(&path).unwrap())
            .status()
            .unwrap();
        assert!(status.success());
        assert_eq!(fs::read(dir.path().join("init")).unwrap(), b"#!/bin/true\n");
        assert_eq!(fs::metadata(dir.path().join("init")).unwrap().permissions().mode() & 0o7777, 0o755);
        for size in 0..9 {
            let file = dir.path().join("keiki/modules.d").join("x".repeat(size + 1));
            assert_eq!(fs::read(&file).unwrap(), vec![b'a'; size]);
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o640);
        }
    }

    #[test]
    fn the_same_contents_give_the_same_bytes() {
        assert_eq!(sample(), sample());
    }

    #[test]
    fn names_the_kernel_would_misread_are_refused() {
        let mut archive = Archive::new(Vec::new());
        for name in ["", "/init", "a\0b", TRAILER] {
            assert!(archive.file(name, 0o644, b"").is_err(), "{name:?}");
        }
    }
}
