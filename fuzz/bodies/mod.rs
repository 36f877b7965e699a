//! What the fuzz targets do with their bytes. `crates/devices/tests/seeds.rs` does the same without
//! a fuzzer.
#![allow(dead_code)]

mod bytes;
pub mod device;
pub mod layer;
mod machine;
mod overlay;
pub mod state;
#[path = "../../crates/devices/tests/support/mod.rs"]
mod support;
