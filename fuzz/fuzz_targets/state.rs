//! Fuzzes device states that nobody saved. `cargo +nightly fuzz run state seeds/state`
#![no_main]

#[path = "../bodies/state.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::run(data));
