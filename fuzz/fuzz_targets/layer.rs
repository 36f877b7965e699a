//! Fuzzes disk layers that nobody wrote. `cargo +nightly fuzz run layer seeds/layer`
#![no_main]

#[path = "../bodies/layer.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::run(data));
