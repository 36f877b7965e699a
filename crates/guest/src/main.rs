//! To be written.
#![allow(missing_docs)]
fn main() {}
