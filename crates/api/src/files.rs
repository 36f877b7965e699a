//! Files, archives and connections of a sandbox as they cross the API.

use crate::ByteStream;
use tokio::io::{AsyncRead, AsyncWrite};

/// A file being read.
pub struct Reading {
    /// Size in bytes when it was opened.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// The contents.
    pub chunks: ByteStream,
}

/// How an archive is unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacking {
    /// Keep numeric owners; otherwise everything belongs to root.
    pub owners: bool,
    /// The archive's top directory becomes the destination itself.
    pub strip_top: bool,
}

/// A connection to a port of a guest. `shutdown` ends one direction; dropping it before both have ended resets the
/// connection. The sandbox counts as in use while it is held.
pub type Dialed = Box<dyn Duplex>;

/// Bytes both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}
