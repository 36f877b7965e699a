//! A device of each kind, with backends that need no path and no privilege.

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
/// An empty overlay for it, as `qemu-img create` makes one: header, table of reference counts, one block of them, and the
/// first table of mappings, in a cluster each.
pub fn empty_overlay() -> Vec<u8> {
    const CLUSTER: usize = 1 << 16;
    let mut bytes = vec![0; 4 * CLUSTER];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &16_u32.to_be_bytes());
    put(24, &DISK.to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(3 * CLUSTER as u64).to_be_bytes());
    put(48, &(CLUSTER as u64).to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    (0..4).for_each(|cluster| put(2 * CLUSTER + 2 * cluster, &1_u16.to_be_bytes()));
    bytes
}

pub fn file(contents: &[u8]) -> File {
    let mut file = File::from(memfd_create("layer", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(contents).unwrap();
    file
}

pub fn block() -> Block {
    let base = Layer { format: Format::Raw, file: file(&[0x5a; 10_000]) };
    Block::new(Disk::open(vec![base], Some(file(&empty_overlay()))).unwrap(), "fuzz")
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
