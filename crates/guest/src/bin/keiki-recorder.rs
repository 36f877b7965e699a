//! `keiki-recorder FILE`: for the tests of clones. Reads random values from each kernel interface
//! without a pause, and writes down each with the time just before. It is static and calls the
//! kernel for every value, so its first value in a copy is the first that the copy's kernel
//! returns.
//!
//! ```text
//!   FILE       a ring of records: time in ns, number and kind, 16 random bytes     8, 8, 16 bytes
//!   FILE.end   written once, in a copy: the number of records after the last one
//! ```
//!
//! In a copy it stops after some records, so that the first ones stay in the ring.

use rustix::{
    io::{pread, pwrite},
    rand::{GetRandomFlags, getrandom},
    time::{ClockId, clock_gettime},
};
use std::{fs::File, io, process::ExitCode};

const RING: u64 = 1 << 17;
/// Records in a copy until it stops.
const IN_COPY: u64 = 5_000;
/// One in this many values is a UUID: the slowest kind.
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
                // The kernel returns this few bytes at once.
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
