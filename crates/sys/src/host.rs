//! The memory of the host.

/// One value of `/proc/meminfo`, in bytes. None if it cannot be read.
#[must_use]
pub fn meminfo(key: &str) -> Option<u64> {
    kib(&std::fs::read_to_string("/proc/meminfo").ok()?, key)
}

/// One value of a text with lines like `Key: 12 kB`, in bytes.
#[must_use]
pub fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::kib;

    #[test]
    fn values_are_found_by_their_whole_name() {
        let text = "MemTotal:       16 kB\nMemAvailable:    8 kB\nHugePages_Total:   0\n";
        assert_eq!(kib(text, "MemTotal"), Some(16 * 1024));
        assert_eq!(kib(text, "MemAvailable"), Some(8 * 1024));
        assert_eq!((kib(text, "Mem"), kib(text, "HugePages_Total")), (None, None));
    }
}
