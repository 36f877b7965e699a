//! A device of each kind, with backends that need neither a path nor a privilege.

use super::overlay::empty_overlay;
use keiki_devices::{
    balloon::{Balloon, Discard},
    block::Block,
    console::Console,
    disk::{Disk, Format, Layer},
    net::Net,
    rng::Rng,
};
use rustix::fs::{MemfdFlags, memfd_create};
use std::{
    fs::File,
    io::{self, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    sync::atomic::{AtomicU64, Ordering},
};
use vm_memory::GuestAddress;

/// Size of the disk.
pub const DISK: u64 = 4 << 20;

pub fn file(contents: &[u8]) -> File {
    let mut file = File::from(memfd_create("layer", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(contents).unwrap();
    file
}

pub fn block() -> Block {
    let base = Layer { format: Format::Raw, file: file(&[0x5a; 10_000]) };
    Block::new(Disk::open(vec![base], Some(file(&empty_overlay(DISK)))).unwrap(), "fuzz")
}

pub fn net() -> Net {
    Net::new(None, [6, 0, 0, 0, 0, 1]).unwrap()
}

pub fn rng() -> Rng {
    Rng::new().unwrap()
}

/// A console and the address of its socket.
pub fn console() -> (Console, SocketAddr) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("keiki-fuzz-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    (Console::new(listener.into(), "fuzz").unwrap(), address)
}

struct Checked;

impl Discard for Checked {
    fn discard(&self, start: GuestAddress, bytes: u64) -> io::Result<()> {
        assert!(start.0.is_multiple_of(4096) && bytes.is_multiple_of(4096) && bytes > 0);
        Ok(())
    }
}

pub fn balloon() -> Balloon {
    Balloon::new(Box::new(Checked))
}
