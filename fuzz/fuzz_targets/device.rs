//! Fuzzes a hostile driver of each virtio device. `cargo +nightly fuzz run device seeds/device`
#![no_main]

#[path = "../bodies/device.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::run(data));
