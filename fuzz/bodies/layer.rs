//! Reads arbitrary disk layers below an empty top: a good one with changed bytes, and the fuzzer's
//! own. Reading ends with bytes or an error.

use super::bytes::Bytes;
use super::machine::{DISK, file};
use super::overlay::empty_overlay;
use keiki_devices::disk::{Disk, Format, Layer};
use vm_memory::VolatileSlice;

pub fn run(data: &[u8]) {
    read(data);
    let mut layer = written();
    let mut bytes = Bytes(data);
    while !bytes.is_empty() {
        let (place, at, value) = (bytes.u8(), bytes.u16(), bytes.u8());
        // The header, and the beginnings of the tables, are where something can be said.
        let within = if place < 128 { 256 } else { 1 << 16 };
        let at = (usize::from(place % 8) << 16) + usize::from(at) % within;
        if let Some(byte) = layer.get_mut(at) {
            *byte = value;
        }
    }
    read(&layer);
}

/// A layer with a few clusters of every kind: data, zeroes, nothing.
fn written() -> Vec<u8> {
    let top = file(&empty_overlay(DISK));
    let mut disk = Disk::open(Vec::new(), Some(top.try_clone().unwrap())).unwrap();
    for offset in [0, 70_000 / 512 * 512, 1 << 20, DISK - 512] {
        disk.write(&[VolatileSlice::from(&mut [7; 512][..])], offset).unwrap();
    }
    disk.write_zeroes(2 << 20, 1 << 17, false).unwrap();
    disk.flush().unwrap();
    let mut bytes = vec![0; top.metadata().unwrap().len() as usize];
    std::os::unix::fs::FileExt::read_exact_at(&top, &mut bytes, 0).unwrap();
    bytes
}

fn read(layer: &[u8]) {
    let base = Layer { format: Format::Raw, file: file(&[1; 5000]) };
    let below = Layer { format: Format::Qcow2, file: file(layer) };
    let Ok(mut disk) = Disk::open(vec![base, below], Some(file(&empty_overlay(DISK)))) else { return };
    let mut into = vec![0; 1 << 20];
    for at in (0..DISK).step_by(into.len()) {
        // Bytes or an error.
        let _ = disk.read(&[VolatileSlice::from(&mut into[..])], at);
    }
    // Copying on write reads it too.
    for at in [512, 70_000 / 512 * 512, 1 << 20, DISK - 512] {
        let _ = disk.write(&[VolatileSlice::from(&mut [9; 512][..])], at);
    }
    let _ = disk.flush();
}
