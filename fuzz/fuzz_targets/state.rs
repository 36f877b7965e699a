//! Fuzzes device states. `scripts/fuzz.sh state`
#![no_main]

#[path = "../bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::state::run(data));
