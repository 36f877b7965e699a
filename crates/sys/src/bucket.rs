//! A token bucket.

use std::time::{Duration, Instant};

/// Allows a burst, and then an amount in each interval.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    burst: u64,
    amount: u64,
    interval: Duration,
    left: u64,
    /// When the current interval began. None before the first use.
    refilled: Option<Instant>,
}

impl TokenBucket {
    /// A full bucket of `burst` tokens that gains `amount` at the end of each `interval`. The
    /// interval must not be zero.
    #[must_use]
    pub const fn new(burst: u64, amount: u64, interval: Duration) -> Self {
        Self { burst, amount, interval, left: burst, refilled: None }
    }

    /// Takes one token. False if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        self.take_up_to(1, now) == 1
    }

    /// Takes as many tokens as are left, `wanted` at most. Returns their number.
    pub fn take_up_to(&mut self, wanted: u64, now: Instant) -> u64 {
        self.refill(now);
        let taken = wanted.min(self.left);
        self.left -= taken;
        taken
    }

    fn refill(&mut self, now: Instant) {
        let refilled = *self.refilled.get_or_insert(now);
        // A clock that goes back takes nothing away.
        let passed = now.saturating_duration_since(refilled);
        if passed < self.interval {
            return;
        }
        let interval = self.interval.as_nanos().max(1);
        let intervals = u64::try_from(passed.as_nanos() / interval).unwrap_or(u64::MAX);
        let rest = u64::try_from(passed.as_nanos() % interval).unwrap_or(0);
        self.left = self.left.saturating_add(intervals.saturating_mul(self.amount)).min(self.burst);
        self.refilled = now.checked_sub(Duration::from_nanos(rest));
    }
}

#[cfg(test)]
mod tests {
    use super::TokenBucket;
    use std::time::{Duration, Instant};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut bucket = TokenBucket::new(100, 10, SECOND);
        let start = Instant::now();
        assert_eq!((0..1000).filter(|_| bucket.take(start)).count(), 100);
        assert!(!bucket.take(start + SECOND / 2), "half an interval gives nothing");
        assert_eq!(bucket.take_up_to(1000, start + SECOND * 3 / 2), 10);
        assert_eq!(bucket.take_up_to(1000, start + SECOND * 2), 10, "the half interval before counts");
        assert_eq!(bucket.take_up_to(4, start + SECOND * 3), 4);
        assert_eq!(bucket.take_up_to(1000, start + SECOND * 4), 16);
    }

    #[test]
    fn never_more_than_the_burst() {
        let mut bucket = TokenBucket::new(8, 1, 30 * SECOND);
        let start = Instant::now();
        assert!(bucket.take(start));
        assert_eq!(bucket.take_up_to(u64::MAX, start + 365 * 24 * 3600 * SECOND), 8);
    }

    #[test]
    fn a_clock_that_goes_back_takes_nothing_away() {
        let mut bucket = TokenBucket::new(2, 1, SECOND);
        let start = Instant::now() + SECOND;
        assert!(bucket.take(start));
        assert!(bucket.take(start - SECOND / 2));
        assert!(!bucket.take(start - SECOND / 2));
        assert!(bucket.take(start + SECOND));
    }
}
