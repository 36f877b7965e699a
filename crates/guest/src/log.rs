//! Log lines on the console. A guest can cause most of them, so their rate is limited: the line
//! after a gap says how many were dropped.

use keiki_sys::bucket::TokenBucket;
use parking_lot::Mutex;
use std::{
    fs::OpenOptions,
    io::Write,
    time::{Duration, Instant},
};

const BURST: u64 = 20;
const PER_SECOND: u64 = 2;

static LIMIT: Mutex<Limit> = Mutex::new(Limit::new());

#[derive(Debug)]
struct Limit {
    bucket: TokenBucket,
    dropped: u64,
}

impl Limit {
    const fn new() -> Self {
        Self { bucket: TokenBucket::new(BURST, PER_SECOND, Duration::from_secs(1)), dropped: 0 }
    }

    /// If a line may be written now: how many were dropped since the last one.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.bucket.take(now) {
            return Some(std::mem::take(&mut self.dropped));
        }
        self.dropped += 1;
        None
    }
}

/// Writes one line to the console.
pub fn line(text: &str) {
    let Some(dropped) = LIMIT.lock().take(Instant::now()) else { return };
    let mut words = String::from("keiki: ");
    // Names that the guest chooses may contain line breaks.
    words.extend(text.chars().take(400).map(|c| if c.is_control() { '?' } else { c }));
    if dropped > 0 {
        words.push_str(&format!(" ({dropped} lines dropped)"));
    }
    words.push('\n');
    if let Ok(mut console) = OpenOptions::new().write(true).open("/dev/console") {
        // There is nowhere to report an error.
        let _ = console.write_all(words.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::{BURST, Limit};
    use std::time::{Duration, Instant};

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (mut limit, start) = (Limit::new(), Instant::now());
        let written = (0..1000).filter(|_| limit.take(start).is_some()).count();
        assert_eq!(written, BURST as usize);
        let later = start + Duration::from_secs(1);
        assert_eq!(limit.take(later), Some(1000 - BURST));
        assert_eq!(limit.take(start), Some(0), "a clock that goes back takes nothing away");
    }
}
