//! Fuzzes device states that nobody saved. `cargo +nightly fuzz run state seeds/state`
#![no_main]

#[path = "../bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::state::run(data));
