//! The generation, as programs learn of it: a file that they can watch, and a signal that they can handle. And as the
//! kernel does: an ID of random bytes.
//!
//! Who watches the file hears of it some time after it goes on. The signal is there before: it is sent while user
//! work stands still, so a process handles it before its next instruction. It is `SIGURG`, to everybody: the kernel
//! ignores it for a process that does not handle it, and one that does (for urgent data, or Go's scheduler) must be
//! ready for it at any time.

use super::machine_id::random;
use crate::{exec::signal_all, sys};
use keiki_protocol::generation::{ADDRESS, DEVICE, LEN};
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

/// The device of the VM generation ID that this agent keeps.
struct Device {
    status: fs::File,
    memory: fs::File,
}

impl Device {
    /// None: there is none, the monitor keeps it, or the memory that it is in cannot be written.
    fn find() -> io::Result<Option<Self>> {
        let path = format!("/sys/bus/acpi/devices/{DEVICE}:00/status");
        let status = match fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = [0; 16];
        let got = status.read_at(&mut text, 0)?;
        if text[..got].trim_ascii() == b"0" {
            return Ok(None);
        }
        // A kernel of somebody's own may not have it, and the generator is seeded all the same.
        let memory = fs::OpenOptions::new().write(true).open("/dev/mem").ok();
        Ok(memory.map(|memory| Self { status, memory }))
    }
}

/// Gives the kernel a new generation ID. Its driver mixes it in and tells those that hold keys, as WireGuard does.
pub fn tell_kernel() -> io::Result<()> {
    static FOUND: OnceLock<Option<Device>> = OnceLock::new();
    let found = match FOUND.get() {
        Some(found) => found,
        None => {
            let found = Device::find()?;
            FOUND.get_or_init(|| found)
        }
    };
    let Some(Device { status, memory }) = found else { return Ok(()) };
    memory.write_all_at(&random::<LEN>()?, ADDRESS)?;
    // Asking is what notifies the driver.
    status.read_at(&mut [0; 16], 0).map(drop)
}

/// Signals all user processes, which these are.
pub fn tell(processes: &[i32]) {
    signal_all(processes, Signal::URG);
}
