//! Tap devices: a network interface whose other side is a descriptor.

#![allow(unsafe_code)]

use rustix::fs::{CWD, Mode, OFlags};
use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

/// `TUNSETIFF` of `linux/if_tun.h`.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
/// `TUNSETPERSIST` of `linux/if_tun.h`.
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;

/// Opens the tap called `name` in the network namespace of the calling thread, and creates it if it
/// does not exist. Each read and write is one Ethernet frame without a header. A device created
/// here is removed with its descriptor unless [`persist`] keeps it.
pub fn open(name: &str) -> io::Result<File> {
    attach(name, libc::IFF_TAP | libc::IFF_NO_PI)
}

/// Like [`open`], for a monitor: each frame has a header that describes checksums and segmentation
/// left to the other side.
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
    // SAFETY: the descriptor is open, and TUNSETIFF reads and writes one `ifreq`, which outlives
    // the call.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF as _, &raw mut request) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(File::from(fd))
}

/// Keeps the device when its descriptor is closed.
pub fn persist(tap: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and TUNSETPERSIST takes its argument by value.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETPERSIST as _, 1 as libc::c_ulong) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `TUNSETOFFLOAD` of `linux/if_tun.h`.
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
/// `TUNSETVNETHDRSZ` of `linux/if_tun.h`.
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;

/// What the reader of a tap can do itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offloads {
    pub checksum: bool,
    /// Segmentation of TCP over IPv4. Needs `checksum`.
    pub tso4: bool,
    /// The same over IPv6.
    pub tso6: bool,
}

/// Sets what the reader of this tap can do itself.
pub fn set_offloads(tap: impl AsFd, offloads: Offloads) -> io::Result<()> {
    let flag = |set: bool, flag: libc::c_uint| if set { libc::c_ulong::from(flag) } else { 0 };
    let flags = flag(offloads.checksum, libc::TUN_F_CSUM)
        | flag(offloads.checksum && offloads.tso4, libc::TUN_F_TSO4)
        | flag(offloads.checksum && offloads.tso6, libc::TUN_F_TSO6);
    // SAFETY: the descriptor is open, and TUNSETOFFLOAD takes its argument by value.
    let done = unsafe { libc::ioctl(tap.as_fd().as_raw_fd(), TUNSETOFFLOAD as _, flags) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets the length of the header before each frame.
pub fn set_header_len(tap: impl AsFd, bytes: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open, and TUNSETVNETHDRSZ reads one int, which outlives the call.
    let done = unsafe { libc::ioctl(tap.as_fd().as_raw_fd(), TUNSETVNETHDRSZ as _, &raw const bytes) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
