//! `keiki-recorder FILE`: for the tests of clones. Draws from each of the kernel's generators without a pause, and writes
//! down each value with the time before it was drawn. It is static and calls the kernel for every value, so that what
//! it draws first in a copy is what the copy's kernel gives first.
//!
//! ```text
//!   FILE       a ring of records: time in ns, number and kind, 16 bytes drawn     each 8, 8, 16 bytes
//!   FILE.end   written once, in a copy: how many records there are, after the last one
//! ```
//!
//! In a copy it stops some records after the first, so that these stay in the ring.

use rustix::{
    io::{pread, pwrite},
    rand::{GetRandomFlags, getrandom},
    time::{ClockId, clock_gettime},
};
use std::{fs::File, io, process::ExitCode};

const RING: u64 = 1 << 17;
/// Drawn in a copy until it stops.
const IN_COPY: u64 = 5_000;
/// One UUID to so many other values: it is the slowest.
const UUID_EVERY: u64 = 32;
const RECORD: usize = 32;
const DRAWN: usize = 16;

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: keiki-recorder FILE");
        return ExitCode::from(2);
    };
    match record(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("keiki-recorder: {error}");
            ExitCode::FAILURE
        }
    }
}

fn record(path: &str) -> io::Result<()> {
    let ring = File::options().write(true).create(true).truncate(true).open(path)?;
    let urandom = File::open("/dev/urandom")?;
    let uuids = File::open("/proc/sys/kernel/random/uuid")?;
    let generation = File::open("/run/keiki/generation")?;
    let first = text(&generation)?;
    let mut in_copy = 0;
    for number in 0.. {
        let now = clock_gettime(ClockId::Realtime);
        let mut drawn = [0; DRAWN];
        let kind = match number % UUID_EVERY {
            0 => {
                drawn = uuid(&text(&uuids)?)?;
                2
            }
            odd if odd % 2 == 1 => {
                // The kernel gives so few bytes at once or none.
                getrandom(&mut drawn, GetRandomFlags::empty())?;
                0
            }
            _ => {
                rustix::io::read(&urandom, &mut drawn)?;
                1
            }
        };
        let time = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let mut line = [0; RECORD];
        line[..8].copy_from_slice(&time.to_le_bytes());
        line[8..16].copy_from_slice(&(number << 2 | kind).to_le_bytes());
        line[16..].copy_from_slice(&drawn);
        pwrite(&ring, &line, number % RING * RECORD as u64)?;
        if in_copy > 0 || text(&generation)? != first {
            in_copy += 1;
        }
        if in_copy > IN_COPY {
            return std::fs::write(format!("{path}.end"), (number + 1).to_string());
        }
    }
    Ok(())
}

fn text(file: &File) -> io::Result<String> {
    let mut bytes = [0; 64];
    let got = pread(file, &mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes[..got]).trim().to_owned())
}

fn uuid(text: &str) -> io::Result<[u8; DRAWN]> {
    let digits = text.replace('-', "");
    u128::from_str_radix(&digits, 16).map(u128::to_be_bytes).map_err(io::Error::other)
}
