//! An empty overlay for fuzz targets and the tests of the monitor, which then need no `qemu-img`.

/// An overlay for a disk of this size: header, table of reference counts, one block of them, and the first
/// table of mappings, in a cluster each. It maps nothing, and its first table has one entry: enough
/// for 512 MiB.
pub fn empty_overlay(disk: u64) -> Vec<u8> {
    const CLUSTER: usize = 1 << 16;
    let mut bytes = vec![0; 4 * CLUSTER];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &16_u32.to_be_bytes());
    put(24, &disk.to_be_bytes());
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
