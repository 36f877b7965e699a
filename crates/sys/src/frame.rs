//! The header of our binary files and packets.
//!
//! ```text
//!   magic | version u32 | length u32 or u64, or none | checksum, 32 bytes or none | body
//! ```
//!
//! Numbers are little-endian. The magic and the version stay where they are in every version of a
//! format, so a reader can always tell the version of what it cannot read.

use std::fmt;

/// The header of one format.
#[derive(Debug, Clone, Copy)]
pub struct Frame {
    pub magic: &'static [u8],
    pub version: u32,
    pub length: Length,
    /// Checksum of the body. None: the format has no checksum.
    pub checksum: Option<Checksum>,
}

/// Computes the checksum of a body.
pub type Checksum = fn(&[u8]) -> [u8; 32];

/// How a header gives the length of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    None,
    U32,
    U64,
}

/// What is wrong with a frame. The text follows the name of the thing: "the state file" + " " +
/// error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameError {
    Short { bytes: usize },
    Magic,
    Version { theirs: u32, ours: u32 },
    Length { header: u64, bytes: usize },
    Checksum,
}

impl Frame {
    #[must_use]
    pub const fn header_len(&self) -> usize {
        let length = match self.length {
            Length::None => 0,
            Length::U32 => 4,
            Length::U64 => 8,
        };
        self.magic.len() + 4 + length + if self.checksum.is_some() { 32 } else { 0 }
    }

    /// The body with its header.
    #[must_use]
    pub fn encode(&self, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.header_len() + body.len());
        bytes.extend(self.magic);
        bytes.extend(self.version.to_le_bytes());
        match self.length {
            Length::None => {}
            // A longer body is refused by its reader.
            Length::U32 => bytes.extend(u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes()),
            Length::U64 => bytes.extend((body.len() as u64).to_le_bytes()),
        }
        if let Some(checksum) = self.checksum {
            bytes.extend(checksum(body));
        }
        bytes.extend(body);
        bytes
    }

    /// Checks the header and returns the body. Accepts any bytes.
    pub fn decode<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], FrameError> {
        let short = FrameError::Short { bytes: bytes.len() };
        let (header, body) = bytes.split_at_checked(self.header_len()).ok_or(short)?;
        let header = header.strip_prefix(self.magic).ok_or(FrameError::Magic)?;
        let (theirs, header) = header.split_first_chunk().ok_or(short)?;
        let theirs = u32::from_le_bytes(*theirs);
        if theirs != self.version {
            return Err(FrameError::Version { theirs, ours: self.version });
        }
        let (length, checksum) = match self.length {
            Length::None => (body.len() as u64, header),
            Length::U32 => {
                let (length, rest) = header.split_first_chunk().ok_or(short)?;
                (u64::from(u32::from_le_bytes(*length)), rest)
            }
            Length::U64 => {
                let (length, rest) = header.split_first_chunk().ok_or(short)?;
                (u64::from_le_bytes(*length), rest)
            }
        };
        if length != body.len() as u64 {
            return Err(FrameError::Length { header: length, bytes: body.len() });
        }
        match self.checksum {
            Some(sum) if sum(body) != checksum => Err(FrameError::Checksum),
            _ => Ok(body),
        }
    }
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { bytes } => write!(f, "is truncated: it has {bytes} bytes, fewer than its header"),
            Self::Magic => write!(f, "has the wrong first bytes"),
            Self::Version { theirs, ours } => {
                write!(f, "has version {theirs}, this program reads version {ours}")
            }
            Self::Length { header, bytes } => {
                write!(f, "is truncated or too long: its header says {header} bytes, it has {bytes}")
            }
            Self::Checksum => write!(f, "is damaged: its checksum differs"),
        }
    }
}

impl std::error::Error for FrameError {}

#[cfg(test)]
mod tests {
    use super::{Frame, FrameError, Length};

    fn sum(body: &[u8]) -> [u8; 32] {
        [body.iter().fold(7, |sum: u8, byte| sum.wrapping_mul(31).wrapping_add(*byte)); 32]
    }

    const PLAIN: Frame = Frame { magic: b"KMON", version: 3, length: Length::U32, checksum: None };
    const FULL: Frame = Frame { magic: b"MAGIC8\n\0", version: 1, length: Length::U64, checksum: Some(sum) };
    const OPEN: Frame = Frame { magic: b"MAGIC", version: 0x0102, length: Length::None, checksum: Some(sum) };

    #[test]
    fn the_bytes_of_each_layout() {
        assert_eq!(PLAIN.encode(b"ab"), b"KMON\x03\0\0\0\x02\0\0\0ab");
        let full = [b"MAGIC8\n\0\x01\0\0\0\x02\0\0\0\0\0\0\0", &sum(b"ab")[..], b"ab"].concat();
        assert_eq!(FULL.encode(b"ab"), full);
        assert_eq!(OPEN.encode(b"ab"), [b"MAGIC\x02\x01\0\0", &sum(b"ab")[..], b"ab"].concat());
        for frame in [PLAIN, FULL, OPEN] {
            assert_eq!(frame.decode(&frame.encode(b"a body")), Ok(&b"a body"[..]));
            assert_eq!(frame.encode(b"").len(), frame.header_len());
        }
    }

    #[test]
    fn each_wrong_part_is_named() {
        let bad = |at: usize, frame: Frame| {
            let mut bytes = frame.encode(b"body");
            bytes[at] ^= 1;
            frame.decode(&bytes).map(|_| ())
        };
        for frame in [PLAIN, FULL, OPEN] {
            let magic = frame.magic.len();
            assert_eq!(bad(0, frame), Err(FrameError::Magic));
            let version = FrameError::Version { theirs: frame.version ^ 1, ours: frame.version };
            assert_eq!(bad(magic, frame), Err(version));
            for cut in 0..frame.header_len() {
                assert_eq!(frame.decode(&frame.encode(b"")[..cut]), Err(FrameError::Short { bytes: cut }));
            }
        }
        for frame in [PLAIN, FULL] {
            let length = FrameError::Length { header: 5, bytes: 4 };
            assert_eq!(bad(frame.magic.len() + 4, frame), Err(length));
        }
        for frame in [FULL, OPEN] {
            assert_eq!(bad(frame.header_len(), frame), Err(FrameError::Checksum));
            assert_eq!(bad(frame.header_len() - 1, frame), Err(FrameError::Checksum));
        }
    }
}
