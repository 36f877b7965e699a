//! Fuzzes disk layers. `scripts/fuzz.sh layer`
#![no_main]

#[path = "../bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|data: &[u8]| bodies::layer::run(data));
