//! Fuzzes the messages of the control socket, both ways. `scripts/fuzz.sh control`
#![no_main]

#[path = "../bodies/control.rs"]
mod control;

libfuzzer_sys::fuzz_target!(|data: &[u8]| control::run(data));
