//! Fuzzes the reader of state files, behind the checksum. `scripts/fuzz.sh frozen`
#![no_main]

#[path = "../bodies/frozen.rs"]
mod frozen;

libfuzzer_sys::fuzz_target!(|data: &[u8]| frozen::run(data));
