//! The agent's few words, on the console. A guest can cause most of them, so they are limited: a burst, then
//! one now and then; how many were left out is told with the next.

use rustix::time::{ClockId, clock_gettime};
use std::{fs::OpenOptions, io::Write, sync::Mutex};

const BURST: u32 = 20;
const PER_SECOND: u32 = 2;

static LIMIT: Mutex<Limit> = Mutex::new(Limit { tokens: BURST, second: 0, dropped: 0 });

#[derive(Debug)]
struct Limit {
    tokens: u32,
    second: i64,
    dropped: u64,
}

impl Limit {
    /// May a line be written now? If so, how many were not since the last one.
    fn take(&mut self, second: i64) -> Option<u64> {
        let passed = u32::try_from(second.saturating_sub(self.second)).unwrap_or(0);
        self.tokens = self.tokens.saturating_add(passed.saturating_mul(PER_SECOND)).min(BURST);
        self.second = second;
        match self.tokens.checked_sub(1) {
            Some(left) => {
                self.tokens = left;
                Some(std::mem::take(&mut self.dropped))
            }
            None => {
                self.dropped += 1;
                None
            }
        }
    }
}

/// Writes one line to the console.
pub fn line(text: &str) {
    let second = clock_gettime(ClockId::Boottime).tv_sec;
    let Ok(mut limit) = LIMIT.lock() else { return };
    let Some(dropped) = limit.take(second) else { return };
    drop(limit);
    let mut words = String::from("keiki: ");
    // A name of the guest's choosing may hold anything; a console line holds one line.
    words.extend(text.chars().take(400).map(|c| if c.is_control() { '?' } else { c }));
    if dropped > 0 {
        words.push_str(&format!(" ({dropped} lines left out)"));
    }
    words.push('\n');
    if let Ok(mut console) = OpenOptions::new().write(true).open("/dev/console") {
        // There is nowhere to report that reporting failed.
        let _ = console.write_all(words.as_bytes());
    }
}

/// An error with everything below it.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut below = error.source();
    while let Some(error) = below {
        text.push_str(&format!(": {error}"));
        below = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{BURST, Limit};

    #[test]
    fn a_flood_is_cut_and_counted() {
        let mut limit = Limit { tokens: BURST, second: 100, dropped: 0 };
        let written = (0..1000).filter(|_| limit.take(100).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(limit.take(101), Some(1000 - u64::from(BURST)));
        assert_eq!(limit.take(50), Some(0), "a clock that goes back takes nothing away");
    }
}
