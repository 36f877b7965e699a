//! Tap devices: a network interface whose other side is a descriptor.

#![allow(unsafe_code)]

use rustix::fs::{CWD, Mode, OFlags};
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
};

/// `TUNSETIFF` of `linux/if_tun.h`.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
/// `TUNSETPERSIST` of `linux/if_tun.h`.
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;

/// Opens the tap called `name` in the calling thread's network namespace, making it if there is none. Each
/// read and write is one Ethernet frame without any header before it. Without [`persist`] a device made here
/// goes with the descriptor.
pub fn open(name: &str) -> io::Result<File> {
    attach(name, libc::IFF_TAP | libc::IFF_NO_PI)
}

/// As [`open`], for a monitor: each frame has a header before it that tells of checksums and segments left to
/// the other side.
pub fn open_offloading(name: &str) -> io::Result<File> {
    attach(name, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR)
}

fn attach(name: &str, flags: libc::c_int) -> io::Result<File> {
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.bytes().any(|byte| byte == 0) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an interface name"));
    }
    let fd: OwnedFd = rustix::fs::openat(CWD, "/dev/net/tun", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: an all-zero `ifreq` is a valid value of this plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    // The flags are small positive constants.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the descriptor is open, and TUNSETIFF reads and writes one `ifreq`, which outlives the call.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF as _, &raw mut request) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(File::from(fd))
}

/// Makes the device stay when its descriptor is closed.
pub fn persist(tap: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and TUNSETPERSIST takes its argument by value.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETPERSIST as _, 1 as libc::c_ulong) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
