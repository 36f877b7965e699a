//! Log lines that a guest can cause, at a bounded rate.

use keiki_sys::bucket::TokenBucket;
use std::{
    fmt,
    io::{self, Write},
    time::{Duration, Instant},
};

/// Lines that may come at once.
const BURST: u64 = 8;
/// After that, one in this time.
const INTERVAL: Duration = Duration::from_secs(30);

/// Says at most [`BURST`] lines at once, then one every [`INTERVAL`], each with the number of those left out. Lines go
/// to standard error: a monitor has no log thread, and a line lost there must not end it.
#[derive(Debug)]
pub struct Limit {
    name: &'static str,
    bucket: TokenBucket,
    suppressed: u64,
}

impl Limit {
    /// For the device of this name.
    pub fn new(name: &'static str) -> Self {
        Self { name, bucket: TokenBucket::new(BURST, 1, INTERVAL), suppressed: 0 }
    }

    /// Says it, or counts it.
    pub fn warn(&mut self, what: fmt::Arguments<'_>) {
        if let Some(suppressed) = self.admit(Instant::now()) {
            let more = if suppressed == 0 { String::new() } else { format!(" ({suppressed} left out)") };
            // There is nowhere to report that to.
            let _ = writeln!(io::stderr(), "{}: {what}{more}", self.name);
        }
    }

    /// Whether a line may be said now, and how many were not since the last.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.bucket.take(now) {
            return Some(std::mem::take(&mut self.suppressed));
        }
        self.suppressed = self.suppressed.saturating_add(1);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{BURST, INTERVAL, Limit};
    use std::time::Instant;

    #[test]
    fn a_flood_becomes_a_few_lines() {
        let mut limit = Limit::new("test");
        let start = Instant::now();
        let said = (0..10_000).filter(|_| limit.admit(start).is_some()).count();
        assert_eq!(said, BURST as usize);
        assert_eq!(limit.admit(start + INTERVAL), Some(10_000 - BURST));
        assert_eq!(limit.admit(start + INTERVAL), None);
    }
}
