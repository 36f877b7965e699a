//! A log file that stays small however much the guest writes.
//!
//! The file holds the last [`KEPT`] to twice [`KEPT`] bytes, oldest first, and is readable at any
//! time: when it is full, its second half is copied over the first and the file is truncated. Bytes
//! are accepted at a bounded rate ([`RATE`]). A line in the log says how many bytes are missing.

use keiki_sys::bucket::TokenBucket;
use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};

/// Bytes that the log always keeps.
pub const KEPT: u64 = 128 * 1024;
/// Bytes a second, after [`BURST`].
pub const RATE: u64 = 64 * 1024;
/// Bytes at once.
pub const BURST: u64 = 512 * 1024;
/// The rate comes in portions a second: a guest that never stops writing gets whole lines, then a
/// gap.
const PORTIONS: u64 = 4;
/// Bytes collected before they are written if no line ends.
const LINE: usize = 512;

#[derive(Debug)]
pub struct ConsoleLog {
    /// None: drop everything.
    file: Option<File>,
    len: u64,
    line: Vec<u8>,
    bucket: TokenBucket,
    missing: u64,
}

impl ConsoleLog {
    /// Continues the log in `file`, which must be open for reading and writing.
    pub fn new(file: Option<File>) -> io::Result<Self> {
        let len = file.as_ref().map_or(Ok(0), |file| file.metadata().map(|meta| meta.len()))?;
        let bucket = TokenBucket::new(BURST, RATE / PORTIONS, Duration::from_secs(1) / PORTIONS as u32);
        Ok(Self { file, len, line: Vec::with_capacity(LINE), bucket, missing: 0 })
    }

    fn push(&mut self, byte: u8, now: Instant) {
        if !self.bucket.take(now) {
            self.missing = self.missing.saturating_add(1);
            return;
        }
        if self.missing > 0 {
            let missing = std::mem::take(&mut self.missing);
            self.line.extend(format!("\n[{missing} bytes left out]\n").bytes());
        }
        self.line.push(byte);
        if byte == b'\n' || self.line.len() >= LINE {
            self.write_line();
        }
    }

    fn write_line(&mut self) {
        let mut line = std::mem::take(&mut self.line);
        self.store(&line);
        line.clear();
        self.line = line;
    }

    /// Ignores errors: a full disk costs console output, not the machine.
    fn store(&mut self, bytes: &[u8]) {
        let Some(file) = &self.file else { return };
        if self.len + bytes.len() as u64 > 2 * KEPT {
            match halve(file, self.len) {
                Ok(len) => self.len = len,
                Err(_) => return,
            }
        }
        if file.write_all_at(bytes, self.len).is_ok() {
            self.len += bytes.len() as u64;
        }
    }
}

/// Keeps the last [`KEPT`] bytes. Returns the new length.
fn halve(file: &File, len: u64) -> io::Result<u64> {
    let keep = KEPT.min(len);
    let mut kept = vec![0; keep as usize];
    file.read_exact_at(&mut kept, len - keep)?;
    file.write_all_at(&kept, 0)?;
    file.set_len(keep)?;
    Ok(keep)
}

impl Write for ConsoleLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = Instant::now();
        bytes.iter().for_each(|&byte| self.push(byte, now));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for ConsoleLog {
    fn drop(&mut self) {
        self.write_line();
    }
}

#[cfg(test)]
mod tests {
    use super::{BURST, ConsoleLog, KEPT, RATE, TokenBucket};
    use std::{
        io::Write,
        time::{Duration, Instant},
    };

    fn text(file: &mut std::fs::File) -> String {
        use std::io::{Read, Seek};
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn the_file_holds_the_last_bytes_in_order() {
        let mut file = tempfile::tempfile().unwrap();
        let mut log = ConsoleLog::new(Some(file.try_clone().unwrap())).unwrap();
        for nth in 0..50_000 {
            writeln!(log, "{nth:07}").unwrap();
            log.bucket = TokenBucket::new(BURST, 0, Duration::from_secs(1));
        }
        let text = text(&mut file);
        let numbers: Vec<u32> = text.lines().map(|line| line.parse().unwrap()).collect();
        assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "in order, none missing");
        assert_eq!(numbers.last(), Some(&49_999));
        assert!((KEPT..=2 * KEPT).contains(&(text.len() as u64)), "{}", text.len());
    }

    #[test]
    fn a_flood_is_cut_and_said_to_be() {
        let mut file = tempfile::tempfile().unwrap();
        let mut log = ConsoleLog::new(Some(file.try_clone().unwrap())).unwrap();
        let start = Instant::now();
        (0..BURST + 1000).for_each(|_| log.push(b'x', start));
        assert_eq!(log.missing, 1000);
        let later = start + Duration::from_secs(1);
        (0..RATE + 7).for_each(|_| log.push(b'y', later));
        assert_eq!(log.missing, 7);
        log.write_line();
        let text = text(&mut file);
        assert!(text.contains("[1000 bytes left out]") && text.ends_with("yyy"), "{text}");
    }
}
