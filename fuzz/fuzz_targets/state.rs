//! Fuzzes device states that nobody saved. `scripts/fuzz.sh state`
#![no_main]

#[path = "../bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::state::run(data));
