//! This process's heap, as the C library keeps it.
//!
//! Freed memory is not the host's again: the library keeps it for the next who asks, in one pool for every few threads.
//! Of large buffers it learns: once one was freed, others of its size come from these pools, too, and each pool grows to
//! the largest that it ever had. [`return_large_buffers`] forbids that, and [`Heap`] tells apart what is used and what is kept.

use std::io;

/// From this size on a buffer is a mapping of its own.
const LARGE: i32 = 1 << 20;

/// What a heap is made of, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heap {
    /// Allocated and not freed. What grows here for ever is a leak.
    pub used: u64,
    /// Freed, and kept for the next who asks.
    pub kept: u64,
}

/// From now on a buffer of a mebibyte and more is the host's again as soon as it is freed.
pub fn return_large_buffers() -> io::Result<()> {
    // SAFETY: it sets a number of the allocator's, under the allocator's own lock.
    match unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) } {
        1 => Ok(()),
        _ => Err(io::Error::other("the C library does not take a limit for its heap")),
    }
}

#[must_use]
pub fn heap() -> Heap {
    // SAFETY: it takes nothing, and reads the allocator's numbers under the allocator's own locks.
    let all = unsafe { libc::mallinfo2() };
    Heap { used: (all.uordblks + all.hblkhd) as u64, kept: all.fordblks as u64 }
}

#[cfg(test)]
mod tests {
    use super::{heap, return_large_buffers};

    const SIZE: usize = 24 << 20;

    /// Twice: it learns from the first.
    fn use_large_buffers() {
        for _ in 0..2 {
            let buffer = vec![1_u8; SIZE];
            assert!(heap().used >= SIZE as u64, "{} bytes are used with {}", heap().used, buffer.len());
        }
    }

    #[test]
    fn a_large_buffer_is_not_kept() {
        use_large_buffers();
        assert!(heap().kept >= SIZE as u64, "nothing is kept anyway: {:?}", heap());
        return_large_buffers().unwrap();
        let before = heap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(use_large_buffers);
            }
        });
        let after = heap();
        assert!(after.kept < before.kept + (SIZE / 2) as u64, "{before:?} and then {after:?}");
    }
}
