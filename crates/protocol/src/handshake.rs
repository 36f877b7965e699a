//! The handshake that starts every agent connection.
//!
//! A guest that was frozen with traffic in flight still holds bytes of a connection that no longer
//! exists, and so does its port. So both ends first have to find each other:
//!
//! 1. The node sends a [`Hello`] and repeats it until it is answered.
//! 2. The guest discards input until it has read a complete valid hello, and answers with its own
//!    [`Hello`] that echoes the nonce. It skips repeats of the same hello.
//! 3. The node discards input until it reads the echo of its nonce. From then on both streams carry
//!    the calls of the release gate (`gate.rs`), if the machine is not released yet, and then
//!    HTTP/2 (the guest is the server).
//!
//! The marker begins with three 0xFF bytes. As an HTTP/2 frame that is a length beyond any limit,
//! so a guest that missed the end of the old connection fails that connection at once and looks for
//! the marker.
//!
//! Layout, 64 bytes, integers little-endian: `marker[16] | version u16 | oldest u16 | reserved u32
//! | generation u64 | nonce[16] | uptime u64 | zero[4] | crc32c u32`.

/// The version of the agent protocol that this build speaks.
pub const VERSION: u16 = 4;
/// The oldest version that this build understands.
pub const OLDEST: u16 = 4;
/// Size of a hello on the wire, in bytes.
pub const HELLO_LEN: usize = 64;
/// The first bytes of a hello.
pub const MARKER: [u8; 16] = *b"\xff\xff\xffKEIKI-HELLO\r\n";

/// The first message of each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Newest protocol version that the sender speaks.
    pub version: u16,
    /// Oldest protocol version that the sender understands.
    pub oldest: u16,
    /// Node: the generation that the guest will get. Guest: the one it has.
    pub generation: u64,
    /// Chosen by the node for this connection; echoed by the guest.
    pub nonce: [u8; 16],
    /// Guest: its uptime in ms when it answers. Node: 0.
    pub uptime_ms: u64,
}

/// Why 64 bytes are not a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The marker is missing.
    #[error("the bytes do not start with the hello marker")]
    Marker,
    /// The checksum does not match.
    #[error("the checksum of the hello is wrong")]
    Checksum,
}

impl Hello {
    /// The hello of this build.
    #[must_use]
    pub fn new(generation: u64, nonce: [u8; 16]) -> Self {
        Self { version: VERSION, oldest: OLDEST, generation, nonce, uptime_ms: 0 }
    }

    /// The version that both sides speak, if any.
    #[must_use]
    pub fn agree(&self) -> Option<u16> {
        let version = self.version.min(VERSION);
        (version >= self.oldest.max(OLDEST)).then_some(version)
    }

    /// Encodes it.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..16].copy_from_slice(&MARKER);
        out[16..18].copy_from_slice(&self.version.to_le_bytes());
        out[18..20].copy_from_slice(&self.oldest.to_le_bytes());
        out[24..32].copy_from_slice(&self.generation.to_le_bytes());
        out[32..48].copy_from_slice(&self.nonce);
        out[48..56].copy_from_slice(&self.uptime_ms.to_le_bytes());
        let sum = crc32c(&out[..60]);
        out[60..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes it.
    ///
    /// # Errors
    /// If the marker or the checksum is wrong.
    pub fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, HelloError> {
        if bytes[..16] != MARKER {
            return Err(HelloError::Marker);
        }
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let sum = u32::from_le_bytes([bytes[60], bytes[61], bytes[62], bytes[63]]);
        if sum != crc32c(&bytes[..60]) {
            return Err(HelloError::Checksum);
        }
        let long = |at: usize| {
            let mut long = [0; 8];
            long.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(long)
        };
        let mut nonce = [0; 16];
        nonce.copy_from_slice(&bytes[32..48]);
        Ok(Self { version: word(16), oldest: word(18), generation: long(24), nonce, uptime_ms: long(48) })
    }
}

/// Finds hellos in a stream of unrelated bytes. Keeps at most the length of one hello.
#[derive(Debug, Default)]
pub struct Scanner {
    window: Vec<u8>,
}

impl Scanner {
    /// Adds one byte. Returns the hello that ends with it, if any.
    pub fn push(&mut self, byte: u8) -> Option<Hello> {
        self.window.push(byte);
        if self.window.len() > HELLO_LEN {
            self.window.remove(0);
        }
        let whole: &[u8; HELLO_LEN] = self.window.as_slice().try_into().ok()?;
        let hello = Hello::decode(whole).ok()?;
        self.window.clear();
        Some(hello)
    }
}

/// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), bit by bit: 64 bytes per connection need
/// no table.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & 0u32.wrapping_sub(crc & 1));
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::{HELLO_LEN, Hello, HelloError, OLDEST, Scanner, VERSION, crc32c};

    #[test]
    fn crc_matches_the_published_check_value() {
        // RFC 3720, appendix B.4 uses this polynomial; "123456789" is its usual check string.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn survives_a_round_trip_and_refuses_damage() {
        let hello = Hello { uptime_ms: 8, ..Hello::new(7, [9; 16]) };
        let wire = hello.encode();
        assert_eq!(Hello::decode(&wire), Ok(hello));
        for at in 0..HELLO_LEN {
            let mut bad = wire;
            bad[at] ^= 1;
            let expected = if at < 16 { HelloError::Marker } else { HelloError::Checksum };
            assert_eq!(Hello::decode(&bad), Err(expected), "byte {at}");
        }
    }

    #[test]
    fn is_found_behind_rubbish_that_looks_like_it() {
        let hello = Hello::new(1, [3; 16]);
        let mut stream = vec![0xff; 100];
        stream.extend_from_slice(&hello.encode()[..40]);
        stream.extend_from_slice(&hello.encode());
        let mut scanner = Scanner::default();
        let found: Vec<_> = stream.into_iter().filter_map(|byte| scanner.push(byte)).collect();
        assert_eq!(found, [hello]);
    }

    #[test]
    fn versions_agree_only_where_they_overlap() {
        let with = |version, oldest| Hello { version, oldest, ..Hello::new(0, [0; 16]) }.agree();
        assert_eq!(with(VERSION, 1), Some(VERSION));
        assert_eq!(with(OLDEST - 1, 1), None);
        assert_eq!(with(VERSION + 4, 1), Some(VERSION));
        assert_eq!(with(VERSION + 4, VERSION + 1), None);
        assert_eq!(with(0, 0), None);
    }
}
