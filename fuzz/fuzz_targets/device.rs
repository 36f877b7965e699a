//! Fuzzes a hostile driver of each virtio device. `scripts/fuzz.sh device`
#![no_main]

#[path = "../bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::device::run(data));
