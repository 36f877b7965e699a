//! A list of runs of pages in a memory file: the working set that a node records and sends as
//! [`crate::Role::Pages`].
//!
//! ```text
//!   first page   u32    number of pages   u32; its highest bit: written, not only read      little-endian
//! ```

const LEN: usize = 8;
const WRITTEN: u32 = 1 << 31;

/// A run of pages in a memory file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pages {
    pub first: u32,
    /// Below 2³¹.
    pub count: u32,
    /// Written, not only read.
    pub written: bool,
}

impl Pages {
    #[must_use]
    pub fn encode(all: &[Self]) -> Vec<u8> {
        let count = |pages: &Self| pages.count & !WRITTEN | if pages.written { WRITTEN } else { 0 };
        all.iter()
            .flat_map(|pages| [pages.first.to_le_bytes(), count(pages).to_le_bytes()])
            .flatten()
            .collect()
    }

    /// The reverse of [`Pages::encode`], and the number of bytes left over. Accepts any bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> (Vec<Self>, usize) {
        let (runs, left) = bytes.as_chunks::<LEN>();
        let run = |[a, b, c, d, e, f, g, h]: &[u8; LEN]| {
            let (first, count) = (u32::from_le_bytes([*a, *b, *c, *d]), u32::from_le_bytes([*e, *f, *g, *h]));
            Self { first, count: count & !WRITTEN, written: count & WRITTEN != 0 }
        };
        (runs.iter().map(run).collect(), left.len())
    }
}

#[cfg(test)]
mod tests {
    use super::{LEN, Pages};
    use proptest::prelude::{any, prop};

    proptest::proptest! {
        #[test]
        fn what_is_encoded_is_decoded(all in prop::collection::vec((any::<u32>(), 0..1_u32 << 31, any::<bool>()), 0..9)) {
            let all: Vec<_> = all.into_iter().map(|(first, count, written)| Pages { first, count, written }).collect();
            let mut bytes = Pages::encode(&all);
            proptest::prop_assert_eq!(bytes.len(), all.len() * LEN);
            proptest::prop_assert_eq!(Pages::decode(&bytes), (all.clone(), 0));
            bytes.extend([1, 2, 3]);
            proptest::prop_assert_eq!(Pages::decode(&bytes), (all, 3));
        }
    }
}
