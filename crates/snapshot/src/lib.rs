//! To be written.
/// To be written.
pub struct Manifest;
