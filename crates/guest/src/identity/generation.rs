//! How a new generation is announced: to programs by a file that they can watch and a signal that
//! they can handle, to the kernel by a random ID.
//!
//! A program that watches the file learns of the change some time after it resumes. The signal
//! comes earlier: it is sent while user work is frozen, so a process handles it before its next
//! instruction. It is `SIGURG` and goes to every process: the kernel ignores it for a process that
//! does not handle it, and a process that does (for urgent data, or Go's scheduler) must expect it
//! at any time.

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

/// Writes the file in place: user work is frozen, and a greater number is never shorter.
pub fn record(generation: u64) -> io::Result<()> {
    static RECORD: OnceLock<fs::File> = OnceLock::new();
    let text = generation.to_string();
    let file = sys::kept_open(&RECORD, || fs::File::create(FILE))?;
    file.write_all_at(text.as_bytes(), 0)?;
    if file.metadata()?.nlink() == 0 {
        // User work has removed or replaced it.
        fs::write(FILE, text)?;
    }
    Ok(())
}

/// The device for the VM generation ID that this agent provides.
struct Device {
    status: fs::File,
    memory: fs::File,
}

impl Device {
    /// None if there is no device, the monitor provides it, or its memory is not writable.
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
        // A custom kernel may not have /dev/mem; the generator is seeded anyway.
        let memory = fs::OpenOptions::new().write(true).open("/dev/mem").ok();
        Ok(memory.map(|memory| Self { status, memory }))
    }
}

/// Gives the kernel a new generation ID. The driver mixes it into the generator and notifies users
/// such as WireGuard.
pub fn renew_kernel_id() -> io::Result<()> {
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
    // Reading the status notifies the driver.
    status.read_at(&mut [0; 16], 0).map(drop)
}

/// Signals user processes.
pub fn signal(processes: &[i32]) {
    signal_all(processes, Signal::URG);
}
