//! Fuzzes the reader of state files, behind the checksum. `cargo +nightly fuzz run frozen seeds/frozen`
#![no_main]

#[path = "../bodies/frozen.rs"]
mod frozen;

libfuzzer_sys::fuzz_target!(|data: &[u8]| frozen::run(data));
