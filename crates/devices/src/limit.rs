//! Limits log lines that a guest can cause.

use keiki_sys::bucket::TokenBucket;
use std::{
    fmt,
    io::{self, Write},
    time::{Duration, Instant},
};

/// Lines at once.
const BURST: u64 = 8;
/// Then one line per interval.
const INTERVAL: Duration = Duration::from_secs(30);

/// Writes at most `BURST` lines at once, then one per `INTERVAL`, with the number of omitted
/// lines. Lines go to standard error: a monitor has no log thread, and a lost line must not end it.
#[derive(Debug)]
pub struct Limit {
    name: &'static str,
    bucket: TokenBucket,
    suppressed: u64,
}

impl Limit {
    pub fn new(name: &'static str) -> Self {
        Self { name, bucket: TokenBucket::new(BURST, 1, INTERVAL), suppressed: 0 }
    }

    /// Writes the line, or counts it as omitted.
    pub fn warn(&mut self, what: fmt::Arguments<'_>) {
        if let Some(suppressed) = self.admit(Instant::now()) {
            let more = if suppressed == 0 { String::new() } else { format!(" ({suppressed} left out)") };
            // There is nowhere to report an error.
            let _ = writeln!(io::stderr(), "{}: {what}{more}", self.name);
        }
    }

    /// Whether a line may be written now. Returns the number of lines omitted since the last one.
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
