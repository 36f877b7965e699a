//! Files in a sandbox.

use crate::error::Result;
use bytes::Bytes;
use futures::stream::BoxStream;

/// A file being read.
pub struct Reading {
    /// Bytes when it was opened.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Its contents.
    pub chunks: BoxStream<'static, Result<Bytes>>,
}
