//! What the header of a disk layer may contain.
//!
//! A qcow2 header can name other files (a backing file, an external data file), and declare how
//! much memory its tables take. A layer may come from anywhere, so its header is compared with what
//! Keiki would have written before anything opens the layer in the format that it claims.

/// Bytes of a header that are looked at. A shorter file is not a layer.
pub const HEADER_LEN: usize = 104;
/// Bits of the size of a cluster.
pub const CLUSTER_BITS: u32 = 16;
/// Bytes of the largest disk there is.
const MAX_DISK: u64 = 64 << 40;
/// Entries of its first table (one for 512 MiB): a bound to what a header makes a reader allocate.
const MAX_L1_ENTRIES: u64 = 1 << 17;
/// Clusters of the table of reference counts, for the same reason.
const MAX_REFCOUNT_CLUSTERS: u64 = 64;

/// Checks the header of an overlay for a disk of `disk` bytes: the fields of version 3 that could
/// reach outside the file or change its meaning. Says what is wrong.
pub fn check_header(header: &[u8; HEADER_LEN], disk: u64) -> Result<(), &'static str> {
    let number = |at, len| number(header, at, len);
    let (magic, version, backing, size) = (number(0, 4), number(4, 4), number(8, 8), number(24, 8));
    let backing_len = number(16, 4);
    let (cluster_bits, encryption, snapshots, incompatible) =
        (number(20, 4), number(32, 4), number(60, 4), number(72, 8));
    let (l1_entries, refcount_clusters) = (number(36, 4), number(56, 4));
    match () {
        () if magic != 0x5146_49fb || version != 3 => Err("is not qcow2 version 3"),
        // QEMU leaves an offset with no length behind when it takes a name away.
        () if backing != 0 && backing_len != 0 => Err("names a backing file"),
        () if encryption != 0 => Err("is encrypted"),
        // Bit 0 means that the file was not closed, as for every layer of a running machine's
        // ancestor. The autoclear bits stand for bitmaps and for a raw external data file.
        () if incompatible & !1 != 0 || number(88, 8) != 0 => {
            Err("uses features that Keiki's layers never use")
        }
        () if snapshots != 0 => Err("has internal snapshots"),
        () if cluster_bits != u64::from(CLUSTER_BITS) => Err("has a cluster size other than 64 KiB"),
        () if size != disk => Err("is for a disk of a different size"),
        () if disk > MAX_DISK => Err("is for a disk larger than the maximum"),
        () if l1_entries > MAX_L1_ENTRIES || refcount_clusters > MAX_REFCOUNT_CLUSTERS => {
            Err("has tables larger than any disk needs")
        }
        () => Ok(()),
    }
}

/// The size of the disk that a header is for.
pub fn disk_bytes(header: &[u8; HEADER_LEN]) -> u64 {
    number(header, 24, 8)
}

/// Bytes that a file with this header has at least: its two first tables. One that is to be written
/// must have them.
pub fn least_bytes(header: &[u8; HEADER_LEN]) -> u64 {
    let number = |at, len| number(header, at, len);
    let l1 = number(40, 8).saturating_add(number(36, 4) * 8);
    let refcounts = number(48, 8).saturating_add(number(56, 4) << CLUSTER_BITS);
    l1.max(refcounts)
}

/// A field, the most significant byte first.
fn number(header: &[u8; HEADER_LEN], at: usize, len: usize) -> u64 {
    header.iter().skip(at).take(len).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::{HEADER_LEN, check_header, disk_bytes};

    fn good() -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(&[0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 3]);
        header[20..24].copy_from_slice(&16_u32.to_be_bytes());
        header[24..32].copy_from_slice(&(64_u64 << 20).to_be_bytes());
        header
    }

    #[test]
    fn a_header_that_reaches_outside_is_refused() {
        let (disk, mut bad_name) = (64 << 20, good());
        assert_eq!(check_header(&good(), disk), Ok(()));
        assert_eq!(disk_bytes(&good()), disk);
        assert!(check_header(&good(), disk + 1).is_err());
        bad_name[15] = 104;
        assert_eq!(check_header(&bad_name, disk), Ok(()));
        bad_name[19] = 9;
        assert!(check_header(&bad_name, disk).is_err());
        let mut huge = good();
        huge[24..32].copy_from_slice(&(65_u64 << 40).to_be_bytes());
        assert!(check_header(&huge, 65 << 40).is_err());
        for (at, value) in [
            (0, 1),
            (7, 2),
            (23, 9),
            (35, 1),
            (36, 1),
            (57, 1),
            (63, 1),
            (79, 4),
            (79, 8),
            (72, 1),
            (95, 1),
            (95, 2),
        ] {
            let mut bad = good();
            bad[at] = value;
            assert!(check_header(&bad, disk).is_err(), "byte {at}");
        }
    }
}
