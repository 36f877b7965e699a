//! The generation, as programs learn of it: a file that they can watch, and a signal that they can handle.
//!
//! Who watches the file hears of it some time after it goes on. The signal is there before: it is sent while user
//! work stands still, so a process handles it before its next instruction. It is `SIGURG`, to everybody: the kernel
//! ignores it for a process that does not handle it, and one that does (for urgent data, or Go's scheduler) must be
//! ready for it at any time.

use crate::{exec::signal_all, sys};
use rustix::process::Signal;
use std::{
    fs, io,
    os::unix::fs::{FileExt, MetadataExt},
    sync::OnceLock,
};

const FILE: &str = "/run/keiki/generation";

/// Nobody reads it meanwhile, since user work stands still; and a greater number is never shorter.
pub fn record(generation: u64) -> io::Result<()> {
    static RECORD: OnceLock<fs::File> = OnceLock::new();
    let text = generation.to_string();
    let file = sys::kept_open(&RECORD, || fs::File::create(FILE))?;
    file.write_all_at(text.as_bytes(), 0)?;
    if file.metadata()?.nlink() == 0 {
        // User work has removed it, or put another in its place.
        fs::write(FILE, text)?;
    }
    Ok(())
}

/// Signals all user processes, which these are.
pub fn tell(processes: &[i32]) {
    signal_all(processes, Signal::URG);
}
