//! The rate of the time stamp counter.

use std::time::{Duration, Instant};

/// kHz of the time stamp counter, measured against the monotonic clock over 50 ms. None if there is
/// no counter.
#[must_use]
pub fn tsc_khz() -> Option<u64> {
    let (from, started) = (read()?, Instant::now());
    std::thread::sleep(Duration::from_millis(50));
    let (to, elapsed) = (read()?, started.elapsed());
    let ticks = u128::from(to.checked_sub(from)?);
    u64::try_from(ticks * 1_000_000 / elapsed.as_nanos().max(1)).ok().filter(|khz| *khz > 100_000)
}

#[cfg(target_arch = "x86_64")]
#[allow(clippy::unnecessary_wraps)]
fn read() -> Option<u64> {
    // SAFETY: every x86-64 processor has the instruction, and user mode may execute it unless the
    // process has forbidden it (PR_SET_TSC), which we never do.
    Some(unsafe { std::arch::x86_64::_rdtsc() })
}

#[cfg(not(target_arch = "x86_64"))]
fn read() -> Option<u64> {
    None
}
