//! Fuzzes disk layers that nobody wrote. `cargo +nightly fuzz run layer seeds/layer`
#![no_main]

#[path = "../bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::layer::run(data));
