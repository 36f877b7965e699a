//! Log lines that a guest can cause, at a bounded rate.

use std::{
    fmt,
    io::{self, Write},
    time::{Duration, Instant},
};

/// Lines that may come at once.
const BURST: u32 = 8;
/// After that, one in this time.
const INTERVAL: Duration = Duration::from_secs(30);

/// Says at most [`BURST`] lines at once, then one every [`INTERVAL`], each with the number of those left out. Lines go
/// to standard error: a monitor has no log thread, and a line lost there must not end it.
#[derive(Debug)]
pub struct Limit {
    name: &'static str,
    left: u32,
    suppressed: u64,
    refilled: Instant,
}

impl Limit {
    /// For the device of this name.
    pub fn new(name: &'static str) -> Self {
        Self { name, left: BURST, suppressed: 0, refilled: Instant::now() }
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
        let earned = now.saturating_duration_since(self.refilled).as_secs() / INTERVAL.as_secs();
        if earned > 0 {
            self.left = BURST.min(self.left.saturating_add(u32::try_from(earned).unwrap_or(BURST)));
            self.refilled = now;
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Some(std::mem::take(&mut self.suppressed))
            }
            None => {
                self.suppressed = self.suppressed.saturating_add(1);
                None
            }
        }
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
        assert_eq!(limit.admit(start + INTERVAL), Some(10_000 - u64::from(BURST)));
        assert_eq!(limit.admit(start + INTERVAL), None);
    }
}
