//! The heap of this process, as the C library manages it.
//!
//! The library keeps freed memory for later allocations, in one pool per few threads. It adapts to
//! large buffers: once one is freed, others of its size come from these pools too, and each pool
//! grows to the largest that it ever had. [`return_large_buffers`] prevents that, and [`Heap`]
//! tells used memory from kept memory.

use std::io;

/// From this size on each buffer is a mapping.
const LARGE: i32 = 1 << 20;

/// Sizes of the heap in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Heap {
    /// Allocated and not freed. Endless growth is a leak.
    pub used: u64,
    /// Freed and kept for later allocations.
    pub kept: u64,
}

/// From now on a freed buffer of 1 MiB or more goes back to the host at once.
pub fn return_large_buffers() -> io::Result<()> {
    // SAFETY: it sets a parameter of the allocator under the lock of the allocator.
    match unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) } {
        1 => Ok(()),
        _ => Err(io::Error::other("the C library does not take a limit for its heap")),
    }
}

#[must_use]
pub fn heap() -> Heap {
    // SAFETY: it reads counters of the allocator under its locks.
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
