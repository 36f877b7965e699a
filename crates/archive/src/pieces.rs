//! A reader and a writer over a channel of byte chunks between a thread and a connection.

use bytes::Bytes;
use std::io::{self, Read, Write};

/// Bytes sent at once.
const PIECE: usize = 64 << 10;

/// Collects small writes and sends them in larger pieces. Flush it at the end.
pub struct Sender<F> {
    /// Sends a piece. False if the receiver is gone.
    send: F,
    buffer: Vec<u8>,
}

impl<F: FnMut(Bytes) -> bool> Sender<F> {
    /// A sender over this function.
    pub fn new(send: F) -> Self {
        Self { send, buffer: Vec::with_capacity(PIECE) }
    }
}

impl<F: FnMut(Bytes) -> bool> Write for Sender<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let take = bytes.len().min(PIECE - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..take]);
        if self.buffer.len() == PIECE {
            self.flush()?;
        }
        Ok(take)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.buffer, Vec::with_capacity(PIECE));
        if (self.send)(piece.into()) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    }
}

/// Reads pieces as one stream. It is an error if the stream ends without a last piece.
pub struct Receiver<F> {
    /// The next piece and whether it is the last. None if no more will come.
    receive: F,
    piece: Bytes,
    ended: bool,
}

impl<F: FnMut() -> Option<(Bytes, bool)>> Receiver<F> {
    /// A receiver over this function.
    pub fn new(receive: F) -> Self {
        Self { receive, piece: Bytes::new(), ended: false }
    }
}

impl<F: FnMut() -> Option<(Bytes, bool)>> Read for Receiver<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match (self.receive)() {
                Some((piece, last)) => (self.piece, self.ended) = (piece, last),
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the transfer was cut off")),
            }
        }
        let take = self.piece.len().min(buffer.len());
        buffer[..take].copy_from_slice(&self.piece.split_to(take));
        Ok(take)
    }
}

#[cfg(test)]
mod tests {
    use super::{PIECE, Receiver, Sender};
    use bytes::Bytes;
    use std::io::{Read, Write};

    #[test]
    fn what_is_sent_is_received() {
        let mut pieces = Vec::new();
        let mut sender = Sender::new(|piece| {
            pieces.push(piece);
            true
        });
        let all: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
        for part in all.chunks(777) {
            sender.write_all(part).unwrap();
        }
        sender.flush().unwrap();
        assert_eq!(pieces.len(), 200_000_usize.div_ceil(PIECE));
        let mut left = pieces.clone().into_iter().map(|piece| (piece, false)).chain([(Bytes::new(), true)]);
        let mut got = Vec::new();
        Receiver::new(|| left.next()).read_to_end(&mut got).unwrap();
        assert!(got == all);
        let mut left = pieces.into_iter().map(|piece| (piece, false));
        assert!(Receiver::new(|| left.next()).read_to_end(&mut got).is_err(), "it was cut off");
    }
}
