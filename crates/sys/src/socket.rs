//! Descriptors over unix sockets.

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
};

/// Sends bytes and one descriptor with the first of them. Returns how many bytes went out.
///
/// # Errors
/// What `sendmsg` says; `WouldBlock` on a full non-blocking socket.
pub fn send_with_descriptor(socket: impl AsFd, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}
