//! The last bytes of an output stream, addressed by their offset from its beginning.

use std::collections::VecDeque;

/// Keeps the last `capacity` bytes.
#[derive(Debug)]
pub struct Ring {
    data: VecDeque<u8>,
    start: u64,
    capacity: usize,
}

impl Ring {
    /// Empty, at offset 0. Memory is allocated as it fills.
    pub fn new(capacity: usize) -> Self {
        Self { data: VecDeque::new(), start: 0, capacity }
    }

    /// Number of bytes that the stream has had so far.
    pub fn end(&self) -> u64 {
        self.start + self.data.len() as u64
    }

    /// Number of bytes kept.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Appends, dropping the oldest bytes beyond the capacity.
    pub fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(self.capacity)..];
        let excess = (self.data.len() + kept.len()).saturating_sub(self.capacity);
        self.data.drain(..excess);
        self.data.extend(kept);
        self.start += (excess + bytes.len() - kept.len()) as u64;
    }

    /// At most `limit` bytes from `offset` or from the oldest byte kept, whichever is later, and
    /// the offset of the first. None if there is nothing.
    pub fn read(&self, offset: u64, limit: usize) -> Option<(u64, Vec<u8>)> {
        let from = offset.max(self.start);
        let skip = usize::try_from(from - self.start).ok().filter(|&skip| skip < self.data.len())?;
        let take = limit.min(self.data.len() - skip);
        let mut out = Vec::with_capacity(take);
        let (front, back) = self.data.as_slices();
        let front = front.get(skip..).unwrap_or_default();
        let back = &back[skip.saturating_sub(self.data.as_slices().0.len())..];
        out.extend_from_slice(&front[..take.min(front.len())]);
        out.extend_from_slice(&back[..take - out.len()]);
        Some((from, out))
    }

    /// Drops all but the last bytes and frees the memory. Offsets stay.
    pub fn keep_last(&mut self, count: usize) {
        let excess = self.data.len().saturating_sub(count);
        self.data.drain(..excess);
        self.start += excess as u64;
        self.data.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::Ring;
    use proptest::prelude::{any, prop};

    #[test]
    fn an_offset_that_was_overwritten_moves_to_the_oldest_byte() {
        let mut ring = Ring::new(4);
        ring.push(b"abc");
        ring.push(b"def");
        assert_eq!((ring.start, ring.end()), (2, 6));
        assert_eq!(ring.read(0, 10), Some((2, b"cdef".to_vec())));
        assert_eq!(ring.read(5, 10), Some((5, b"f".to_vec())));
        assert_eq!(ring.read(6, 10), None);
        ring.push(b"0123456789");
        assert_eq!(ring.read(0, 3), Some((12, b"678".to_vec())));
        ring.keep_last(3);
        assert_eq!((ring.end(), ring.read(0, 10)), (16, Some((13, b"789".to_vec()))));
        ring.keep_last(0);
        assert_eq!((ring.end(), ring.len(), ring.data.capacity()), (16, 0, 0));
    }

    proptest::proptest! {
        #[test]
        fn is_the_tail_of_what_was_pushed(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            capacity in 1usize..64,
            offset in 0u64..900,
            limit in 0usize..90,
        ) {
            let mut ring = Ring::new(capacity);
            for chunk in &chunks {
                ring.push(chunk);
            }
            let all = chunks.concat();
            let start = all.len().saturating_sub(capacity);
            assert_eq!(ring.start, start as u64);
            assert_eq!(ring.end(), all.len() as u64);
            let from = (offset as usize).max(start);
            match ring.read(offset, limit) {
                None => assert!(from >= all.len()),
                Some((at, data)) => {
                    assert_eq!(at, from as u64);
                    assert_eq!(data, all[from..(from + limit).min(all.len())]);
                }
            }
        }
    }
}
