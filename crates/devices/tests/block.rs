//! Disks and virtio-blk, on real files, read back by other programs.

mod support;

use keiki_devices::{
    Device, StateError,
    block::Block,
    disk::{CLUSTER, Disk, DiskError, Format, Layer, MAX_LAYERS},
};
use proptest::prelude::{Strategy, any, prop_assert_eq, prop_oneof, proptest};
use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};
use support::{Driver, Piece, into, out, soon};

const MIB: u64 = 1 << 20;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// A directory with layers of one disk.
struct Store {
    dir: tempfile::TempDir,
    bytes: u64,
}

impl Store {
    fn new(bytes: u64) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), bytes }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn raw(&self, name: &str, contents: &[u8]) -> Layer {
        std::fs::write(self.path(name), contents).unwrap();
        Layer { format: Format::Raw, file: File::open(self.path(name)).unwrap() }
    }

    /// An empty overlay, open for writing.
    fn top(&self, name: &str) -> File {
        let size = self.bytes.to_string();
        let path = self.path(name);
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=64k", path.to_str().unwrap(), &size]);
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn lower(&self, name: &str) -> Layer {
        Layer { format: Format::Qcow2, file: File::open(self.path(name)).unwrap() }
    }

    /// The contents of a chain, bottom first, as `qemu-img` reads them.
    fn contents(&self, chain: &[(&str, &str)]) -> Vec<u8> {
        let mut backing = String::new();
        for (name, format) in chain {
            let path = self.path(name);
            let above = if *format == "raw" { String::new() } else { format!(",\"backing\":{backing}") };
            backing = format!(
                "{{\"driver\":\"{format}\",\"read-only\":true,\"file\":{{\"driver\":\"file\",\"locking\":\"off\",\"read-only\":true,\"filename\":\"{}\"}}{above}}}",
                path.display()
            );
        }
        let into = self.path("converted");
        qemu_img(&["convert", "-O", "raw", &format!("json:{backing}"), into.to_str().unwrap()]);
        let mut bytes = std::fs::read(into).unwrap();
        bytes.resize(self.bytes as usize, 0);
        bytes
    }

    fn check(&self, name: &str) {
        qemu_img(&["check", "-q", "-f", "qcow2", self.path(name).to_str().unwrap()]);
    }
}

fn qemu_img(args: &[&str]) {
    let output = Command::new("qemu-img").args(args).output().expect("qemu-img is installed");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    header
}

/// Makes one request. Returns status and data.
fn ask(driver: &mut Driver<Block>, kind: u32, sector: u64, sent: &[u8], read: usize) -> (u8, Vec<u8>) {
    let head = driver.data(&header(kind, sector));
    let status = driver.room(1);
    driver.memory_fill(status, 0xff);
    let mut pieces = vec![head];
    if !sent.is_empty() {
        pieces.push(driver.data(sent));
    }
    let room = driver.room(read);
    if read > 0 {
        pieces.push(into(room, read as u32));
    }
    pieces.push(into(status, 1));
    driver.request(0, &pieces);
    (driver.bytes(status, 1)[0], driver.bytes(room, read))
}

trait Fill {
    fn memory_fill(&mut self, at: u64, byte: u8);
}

impl Fill for Driver<Block> {
    fn memory_fill(&mut self, at: u64, byte: u8) {
        use vm_memory::Bytes;
        self.memory.write_obj(byte, vm_memory::GuestAddress(at)).unwrap();
    }
}

fn write(driver: &mut Driver<Block>, sector: u64, bytes: &[u8]) {
    assert_eq!(ask(driver, 1, sector, bytes, 0).0, OK);
}

fn read(driver: &mut Driver<Block>, sector: u64, len: usize) -> Vec<u8> {
    let (status, bytes) = ask(driver, 0, sector, &[], len);
    assert_eq!(status, OK);
    bytes
}

fn flush(driver: &mut Driver<Block>) {
    assert_eq!(ask(driver, 4, 0, &[], 0).0, OK);
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// Switches the top, like a freeze.
fn switch(disk: &mut Disk, top: File) -> Result<(), DiskError> {
    let top = disk.prepare_top(top)?;
    disk.switch_top(top)
}

#[test]
fn what_a_guest_writes_other_programs_read_and_the_other_way_round() {
    let store = Store::new(64 * MIB);
    let base = pattern(40 << 20, 1);
    // The bottom is shorter than the disk.
    let bottom = store.raw("base", &base);
    // A layer that QEMU wrote.
    drop(store.top("middle"));
    let middle = store.path("middle");
    let script = format!(
        "{{\"driver\":\"qcow2\",\"file\":{{\"driver\":\"file\",\"filename\":\"{}\"}}}}",
        middle.display()
    );
    let written =
        Command::new("qemu-io").args(["-c", "write -P 0xa5 1M 192k", &format!("json:{script}")]).output();
    assert!(written.expect("qemu-io is installed").status.success());
    let disk = Disk::open(vec![bottom, store.lower("middle")], Some(store.top("top"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    let mut expected = base;
    expected.resize(64 << 20, 0);
    expected[1 << 20..(1 << 20) + (192 << 10)].fill(0xa5);
    assert_eq!(read(&mut driver, 2048 - 8, 1 << 20), expected[2040 * 512..2040 * 512 + (1 << 20)]);
    for (sector, len, seed) in
        [(3_u64, 512_usize, 2_u64), (2000, 200 << 10, 3), (100_000, 4096, 4), (131_071, 512, 5)]
    {
        let bytes = pattern(len, seed);
        write(&mut driver, sector, &bytes);
        expected[sector as usize * 512..sector as usize * 512 + len].copy_from_slice(&bytes);
        assert_eq!(read(&mut driver, sector, len), bytes);
    }
    flush(&mut driver);
    let chain = [("base", "raw"), ("middle", "qcow2"), ("top", "qcow2")];
    assert!(store.contents(&chain) == expected);
    store.check("top");
}

#[test]
fn a_piece_may_cross_regions_and_be_split_anywhere() {
    let store = Store::new(8 * MIB);
    let disk = Disk::open(vec![store.raw("base", &[])], Some(store.top("top"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    let bytes = pattern(4096, 9);
    let (head, status) = (driver.data(&header(1, 16)), driver.room(1));
    let data = driver.data(&bytes);
    let cut = [1_u32, 511, 1000, 2584];
    let mut pieces: Vec<Piece> = vec![head];
    let mut at = data.at;
    for len in cut {
        pieces.push(out(at, len));
        at += u64::from(len);
    }
    pieces.push(into(status, 1));
    driver.request(0, &pieces);
    assert_eq!(driver.bytes(status, 1), [OK]);
    // Above 4 GiB, status and data in one piece.
    let at = support::HIGH.0 + 4096;
    let head = driver.data(&header(0, 16));
    assert_eq!(driver.request(0, &[head, into(at, 4097)]), 4097);
    assert_eq!(driver.bytes(at, 4097), [&bytes[..], &[OK]].concat());
}

#[test]
fn a_guest_cannot_reach_what_is_not_there() {
    let store = Store::new(8 * MIB);
    let sectors = 8 * MIB / 512;
    let disk = Disk::open(vec![store.raw("base", &[])], Some(store.top("top"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    for (kind, sector, sent, room) in [
        (0, sectors, 0, 512),
        (0, sectors - 1, 0, 1024),
        (0, u64::MAX, 0, 512),
        (0, u64::MAX / 512, 0, 512),
        (0, 0, 0, 511),
        (0, 0, 0, 0),
        (1, sectors, 512, 0),
        (1, 1 << 55, 512, 0),
        (1, 0, 513, 0),
        (1, 0, 0, 0),
        (8, 0, 0, 19),
        (11, 0, 15, 0),
        (11, 0, 0, 0),
        (13, 0, 16 * 9, 0),
    ] {
        let sent = vec![0; sent];
        assert_eq!(ask(&mut driver, kind, sector, &sent, room).0, IOERR, "{kind} at {sector}");
    }
    assert_eq!(ask(&mut driver, 77, 0, &[], 0).0, UNSUPPORTED);
    for bad in [range(sectors, 1, 0), range(sectors - 1, 2, 0), range(0, u32::MAX, 0), range(u64::MAX, 1, 0)]
    {
        assert_eq!(ask(&mut driver, 11, 0, &bad, 0).0, IOERR);
        assert_eq!(ask(&mut driver, 13, 0, &bad, 0).0, IOERR);
    }
    assert_eq!(ask(&mut driver, 13, 0, &range(0, 1, 2), 0).0, UNSUPPORTED);
    // A truncated header, no status byte, a huge segment, one outside RAM: nothing is written.
    let short = driver.data(&[0; 15]);
    let status = driver.room(1);
    driver.request(0, &[short, into(status, 1)]);
    assert_eq!(driver.bytes(status, 1), [IOERR]);
    let head = driver.data(&header(0, 0));
    assert_eq!(driver.request(0, &[head]), 0);
    for (at, len) in [(0, u32::MAX), (28 << 20, 512), (u64::MAX - 100, 512), ((24 << 20) - 256, 512)] {
        assert_eq!(driver.request(0, &[head, into(at, len), into(status, 1)]), 0);
    }
    assert_eq!(driver.get(support::STATUS), support::RUNNING, "and the device continues");
    assert_eq!(ask(&mut driver, 8, 0, &[], 20), (OK, b"disk0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec()));
}

#[test]
fn a_read_only_disk_is_not_written() {
    let store = Store::new(MIB);
    let base = pattern(1 << 20, 4);
    let mut driver =
        Driver::new(Block::new(Disk::open(vec![store.raw("base", &base)], None).unwrap(), "data"));
    assert_ne!(driver.offered() & 1 << 5, 0, "it says so");
    assert_eq!(driver.offered() & (1 << 13 | 1 << 14), 0);
    assert_eq!(read(&mut driver, 7, 4096), base[7 * 512..7 * 512 + 4096]);
    for (kind, sent) in [(1, vec![1; 512]), (11, range(0, 1, 0)), (13, range(0, 1, 0))] {
        assert_eq!(ask(&mut driver, kind, 0, &sent, 0).0, IOERR);
    }
    flush(&mut driver);
    assert_eq!(std::fs::read(store.path("base")).unwrap(), base);
    assert!(matches!(
        switch(driver.mmio.device_mut().disk_mut(), store.top("top")),
        Err(DiskError::ReadOnly)
    ));
}

#[test]
fn a_freeze_gives_both_copies_a_top_of_their_own() {
    let store = Store::new(16 * MIB);
    let disk = Disk::open(vec![store.raw("base", &pattern(1 << 20, 1))], Some(store.top("t0"))).unwrap();
    let mut parent = Driver::new(Block::new(disk, "disk0"));
    write(&mut parent, 8, &pattern(8192, 2));
    // Like the monitor.
    parent.mmio.pause(soon()).unwrap();
    switch(parent.mmio.device_mut().disk_mut(), store.top("t1")).unwrap();
    let state = parent.mmio.save().unwrap();
    parent.mmio.resume().unwrap();
    let frozen = std::fs::read(store.path("t0")).unwrap();
    let chain =
        vec![Layer { format: Format::Raw, file: File::open(store.path("base")).unwrap() }, store.lower("t0")];
    let disk = Disk::open(chain, Some(store.top("child"))).unwrap();
    let mut child = parent.thawed(Block::new(disk, "disk0"), &state).unwrap();
    assert_eq!(read(&mut child, 8, 8192), pattern(8192, 2), "unflushed writes are there");
    write(&mut child, 9, &[1; 512]);
    assert_eq!(read(&mut child, 8, 8192)[512..1024], [1; 512]);
    // The child uses the rings now, so look at the disk of the parent directly.
    assert_eq!(whole(parent.mmio.device_mut().disk_mut(), 4096, 8192), pattern(8192, 2));
    parent.mmio.device_mut().disk_mut().flush().unwrap();
    child.mmio.device_mut().disk_mut().flush().unwrap();
    assert_eq!(std::fs::read(store.path("t0")).unwrap(), frozen, "the frozen layer does not change");
    for layer in ["t0", "t1", "child"] {
        store.check(layer);
    }
}

#[test]
fn layers_that_were_flattened_take_the_place_of_their_own() {
    let store = Store::new(8 * MIB);
    let disk = Disk::open(vec![store.raw("base", &pattern(1 << 20, 1))], Some(store.top("t0"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    write(&mut driver, 100, &pattern(70_000 / 512 * 512, 2));
    switch(driver.mmio.device_mut().disk_mut(), store.top("t1")).unwrap();
    write(&mut driver, 5, &pattern(512, 3));
    let disk = driver.mmio.device_mut().disk_mut();
    assert_eq!(disk.lower_layers(), 2);
    let before = whole(disk, 0, 8 << 20);
    let flat = store.contents(&[("base", "raw"), ("t0", "qcow2")]);
    disk.rebase(vec![store.raw("flat", &flat)]).unwrap();
    assert_eq!(disk.lower_layers(), 1);
    assert!(whole(disk, 0, 8 << 20) == before);
    write(&mut driver, 300, &pattern(512, 8));
    assert_eq!(read(&mut driver, 300, 512), pattern(512, 8));
    flush(&mut driver);
    store.check("t1");
}

#[test]
fn a_failed_switch_changes_nothing() {
    let store = Store::new(8 * MIB);
    let disk = Disk::open(vec![store.raw("base", &[])], Some(store.top("t0"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    write(&mut driver, 1, &[7; 512]);
    let disk = driver.mmio.device_mut().disk_mut();
    let other = Store::new(4 * MIB);
    assert!(matches!(switch(disk, other.top("small")), Err(DiskError::Layer { .. })));
    let junk = store.raw("junk", &[0; 200]).file;
    assert!(matches!(switch(disk, junk), Err(DiskError::Layer { .. })));
    // A valid header and nothing else.
    let cut = store.top("cut");
    cut.set_len(110).unwrap();
    assert_eq!(switch(disk, cut).unwrap_err().to_string(), "disk layer 2 is truncated");
    write(&mut driver, 2, &[8; 512]);
    assert_eq!(read(&mut driver, 1, 1024), [[7; 512], [8; 512]].concat());
}

#[test]
fn only_layers_of_ours_are_opened() {
    let store = Store::new(8 * MIB);
    let refused = |lower, top| Disk::open(lower, top).unwrap_err();
    assert!(matches!(refused(vec![], None), DiskError::Count(0)));
    let many = (0..=MAX_LAYERS).map(|_| store.raw("base", &[0; 512])).collect();
    assert!(matches!(refused(many, None), DiskError::Count(_)));
    let twice = vec![store.raw("base", &[0; 512]), store.raw("base", &[0; 512])];
    assert!(matches!(refused(twice, None), DiskError::Layer { index: 1, .. }));
    let large = vec![store.raw("large", &vec![0; 9 << 20])];
    assert!(matches!(refused(large, Some(store.top("t"))), DiskError::Layer { index: 0, .. }));
    // A layer that names another file of the host.
    let victim = store.path("victim");
    std::fs::write(&victim, b"secret").unwrap();
    let bad = store.path("bad");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-u",
        "-F",
        "raw",
        "-b",
        victim.to_str().unwrap(),
        bad.to_str().unwrap(),
        "8M",
    ]);
    let open = || File::options().read(true).write(true).open(&bad).unwrap();
    let error = refused(vec![], Some(open()));
    assert_eq!(error.to_string(), "disk layer 0 names a backing file");
    let below = vec![Layer { format: Format::Qcow2, file: open() }];
    assert!(matches!(refused(below, Some(store.top("t"))), DiskError::Layer { index: 0, .. }));
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zeroes_over_a_base() {
    let store = Store::new(16 * MIB);
    let disk = Disk::open(vec![store.raw("base", &vec![0x55; 16 << 20])], Some(store.top("top"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    write(&mut driver, 0, &vec![0x66; 1 << 20]);
    flush(&mut driver);
    let room = |store: &Store| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(store.path("top")).unwrap().blocks() * 512
    };
    let before = room(&store);
    let per = (CLUSTER / 512) as u32;
    // Half a cluster at each end is kept.
    assert_eq!(ask(&mut driver, 11, 0, &range(u64::from(per) / 2, 9 * per, 0), 0).0, OK);
    flush(&mut driver);
    assert!(
        room(&store) + 8 * CLUSTER <= before + CLUSTER,
        "room is given back: {before} to {}",
        room(&store)
    );
    let bytes = read(&mut driver, 0, 1 << 20);
    let cluster = CLUSTER as usize;
    assert!(bytes[..cluster].iter().all(|&byte| byte == 0x66));
    assert!(bytes[cluster..9 * cluster].iter().all(|&byte| byte == 0));
    assert!(bytes[10 * cluster..].iter().all(|&byte| byte == 0x66));
    // Zeroes are exact, over written data and over the base.
    for (sector, flags) in [(10 * per + 3, 0), (64 * per + 5, 1)] {
        assert_eq!(ask(&mut driver, 13, 0, &range(sector.into(), 2 * per, flags), 0).0, OK);
        let around = read(&mut driver, u64::from(sector) - 1, (2 * CLUSTER + 1024) as usize);
        let zero = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
        assert!(
            !zero(&around[..512])
                && zero(&around[512..around.len() - 512])
                && !zero(&around[around.len() - 512..])
        );
    }
    flush(&mut driver);
    store.check("top");
}

#[test]
fn a_full_store_costs_requests_and_not_what_was_written() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let store = Store::new(16 * MIB);
    drop(store.top("empty"));
    // A file that cannot grow beyond 1 MiB.
    let top = File::from(memfd_create("top", MemfdFlags::ALLOW_SEALING).unwrap());
    top.write_all_at(&std::fs::read(store.path("empty")).unwrap(), 0).unwrap();
    top.set_len(MIB).unwrap();
    fcntl_add_seals(&top, SealFlags::GROW).unwrap();
    let disk =
        Disk::open(vec![store.raw("base", &pattern(1 << 20, 1))], Some(top.try_clone().unwrap())).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    let cluster = CLUSTER / 512;
    let (mut written, mut failed) = (Vec::new(), 0);
    for nth in 0..40 {
        let bytes = pattern(4096, nth + 1);
        match ask(&mut driver, 1, nth * cluster, &bytes, 0).0 {
            OK => written.push((nth, bytes)),
            status => {
                assert_eq!(status, IOERR);
                failed += 1;
            }
        }
    }
    assert!(written.len() >= 8 && failed >= 20, "{} of 40 written", written.len());
    flush(&mut driver);
    for (nth, bytes) in &written {
        assert_eq!(read(&mut driver, nth * cluster, 4096), *bytes);
    }
    // Other programs see it too.
    let mut contents = vec![0; MIB as usize];
    top.read_exact_at(&mut contents, 0).unwrap();
    std::fs::write(store.path("full"), contents).unwrap();
    let seen = store.contents(&[("base", "raw"), ("full", "qcow2")]);
    for (nth, bytes) in &written {
        let at = (nth * CLUSTER) as usize;
        assert_eq!(seen[at..at + 4096], bytes[..]);
    }
    // Overwriting needs no space, and discarding frees some.
    write(&mut driver, written[0].0 * cluster, &[9; 4096]);
    assert_eq!(
        ask(&mut driver, 11, written[1].0 * cluster, &range(written[1].0 * cluster, cluster as u32, 0), 0).0,
        OK
    );
    flush(&mut driver);
    write(&mut driver, 100 * cluster, &[3; 4096]);
}

#[test]
fn a_long_chain_is_read_and_one_too_long_refused() {
    let store = Store::new(MIB);
    let mut disk = Disk::open(vec![store.raw("base", &[1; 512])], Some(store.top("t0"))).unwrap();
    let empty = std::fs::read(store.path("t0")).unwrap();
    let next = |nth: usize| {
        let path = store.path(&format!("t{nth}"));
        std::fs::write(&path, &empty).unwrap();
        File::options().read(true).write(true).open(path).unwrap()
    };
    for nth in 1..MAX_LAYERS - 1 {
        put(&mut disk, 512 * nth as u64, &[nth as u8; 512]);
        switch(&mut disk, next(nth)).unwrap();
    }
    let sectors = whole(&disk, 0, 512 * (MAX_LAYERS - 1));
    assert!(
        sectors
            .chunks(512)
            .enumerate()
            .all(|(nth, sector)| sector.iter().all(|&byte| byte == nth.max(1) as u8))
    );
    assert!(matches!(switch(&mut disk, next(1000)), Err(DiskError::Count(count)) if count == MAX_LAYERS + 1));
    assert_eq!(whole(&disk, 0, 512), [1; 512], "and it continues");
    // Earlier tops are synced once.
    disk.flush().unwrap();
}

#[test]
fn a_driver_without_flush_is_written_through() {
    let store = Store::new(8 * MIB);
    let disk = Disk::open(vec![store.raw("base", &[])], Some(store.top("top"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    // The library keeps new reference counts in memory until a flush.
    write(&mut driver, 8, &[1; 512]);
    let path = store.path("top");
    let checks =
        || Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&path).output().unwrap();
    assert!(!checks().status.success(), "not flushed");
    let features = driver.offered() & !(1 << 9);
    driver.negotiate(features);
    write(&mut driver, 8, &[2; 512]);
    assert!(checks().status.success());
}

#[test]
fn the_configuration_is_where_the_specification_has_it() {
    use virtio_bindings::virtio_blk::virtio_blk_config;
    let store = Store::new(8 * MIB);
    let disk = Disk::open(vec![store.raw("base", &[])], Some(store.top("top"))).unwrap();
    let mut driver = Driver::new(Block::new(disk, "disk0"));
    for (offset, value) in [
        (std::mem::offset_of!(virtio_blk_config, capacity), 16384),
        (std::mem::offset_of!(virtio_blk_config, size_max), 65536),
        (std::mem::offset_of!(virtio_blk_config, seg_max), 254),
        (std::mem::offset_of!(virtio_blk_config, blk_size), 512),
        (std::mem::offset_of!(virtio_blk_config, physical_block_exp), 3),
        (std::mem::offset_of!(virtio_blk_config, max_discard_sectors), 1 << 17),
        (std::mem::offset_of!(virtio_blk_config, max_discard_seg), 8),
        (std::mem::offset_of!(virtio_blk_config, discard_sector_alignment), 128),
        (std::mem::offset_of!(virtio_blk_config, max_write_zeroes_sectors), 1 << 17),
        (std::mem::offset_of!(virtio_blk_config, max_write_zeroes_seg), 8),
        (std::mem::offset_of!(virtio_blk_config, write_zeroes_may_unmap), 1),
    ] {
        assert_eq!(driver.get(support::CONFIG + offset as u64), value, "at {offset}");
    }
    assert_eq!(driver.get(support::CONFIG + 60), 0);
}

/// Reads a disk without a guest.
fn whole(disk: &Disk, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    disk.read(&[vm_memory::VolatileSlice::from(&mut bytes[..])], offset).unwrap();
    bytes
}

fn put(disk: &mut Disk, offset: u64, bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    disk.write(&[vm_memory::VolatileSlice::from(&mut bytes[..])], offset).unwrap();
}

/// Runs this test binary again as a writer and kills it: see below.
const WRITER: &str = "KEIKI_TEST_WRITER";

#[test]
fn what_was_flushed_survives_a_writer_that_is_killed() {
    if let Ok(dir) = std::env::var(WRITER) {
        write_forever(Path::new(&dir));
    }
    for round in 0..4 {
        let store = Store::new(64 * MIB);
        drop((store.raw("base", &[0x11; 4096]), store.top("top")));
        let log = File::create_new(store.path("flushed")).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["what_was_flushed_survives_a_writer_that_is_killed", "--exact", "--nocapture"])
            .env(WRITER, store.dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let begun = std::time::Instant::now();
        while log.metadata().unwrap().len() < 8 * (20 + 30 * round) {
            assert!(begun.elapsed().as_secs() < 60, "the writer writes");
            std::thread::sleep(std::time::Duration::from_millis(3));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let flushed = std::fs::read(store.path("flushed")).unwrap();
        let last = flushed.chunks_exact(8).count() as u64;
        let contents = store.contents(&[("base", "raw"), ("top", "qcow2")]);
        // Our reader sees the same as QEMU.
        let disk = Disk::open(
            vec![
                Layer { format: Format::Raw, file: File::open(store.path("base")).unwrap() },
                store.lower("top"),
            ],
            None,
        )
        .unwrap();
        assert!(whole(&disk, 0, 64 << 20) == contents);
        for step in 0..last {
            let (offset, bytes) = step_of(step);
            // A later step may have written there too, but none within the first 1000.
            assert!(
                contents[offset as usize..offset as usize + bytes.len()] == bytes[..],
                "step {step} of {last}"
            );
        }
    }
}

/// Scattered, so that tables and reference counts are written in every order.
fn step_of(step: u64) -> (u64, Vec<u8>) {
    let slot = (step * 379) % 1000;
    (slot * CLUSTER + 512 * (step % 50), pattern(512 * (1 + step as usize % 7), step + 1))
}

fn write_forever(dir: &Path) -> ! {
    let open = |name: &str| File::options().read(true).write(true).open(dir.join(name)).unwrap();
    let base = Layer { format: Format::Raw, file: open("base") };
    let mut disk = Disk::open(vec![base], Some(open("top"))).unwrap();
    let flushed = open("flushed");
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    for step in 0..1000 {
        // A monitor that forks has only its own threads. Otherwise the parent of this test waits in
        // vain.
        assert_eq!(threads(), before);
        let (offset, bytes) = step_of(step);
        put(&mut disk, offset, &bytes);
        disk.flush().unwrap();
        flushed.write_all_at(&step.to_le_bytes(), step * 8).unwrap();
    }
    std::process::exit(0);
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64, u8),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Switch,
    Flush,
}

const SMALL: u64 = 4 * MIB;

fn step() -> impl Strategy<Value = Step> {
    let place = (0..SMALL / 512, 1..300_u64).prop_map(|(at, len)| (at, len.min(SMALL / 512 - at)));
    prop_oneof![
        4 => (place.clone(), any::<u8>()).prop_map(|((at, len), byte)| Step::Write(at, len, byte)),
        2 => (place.clone(), any::<bool>()).prop_map(|((at, len), unmap)| Step::Zero(at, len, unmap)),
        1 => place.prop_map(|(at, len)| Step::Discard(at, len)),
        1 => proptest::prelude::Just(Step::Switch),
        1 => proptest::prelude::Just(Step::Flush),
    ]
}

proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 24, ..Default::default() })]

    /// Any sequence of requests leaves what an array would hold, whatever layers it is spread over.
    #[test]
    fn a_disk_is_an_array(steps in proptest::collection::vec(step(), 1..40)) {
        let store = Store::new(SMALL);
        let base = pattern(3 << 20, 77);
        let mut model = base.clone();
        model.resize(SMALL as usize, 0);
        let template = store.top("t0");
        let empty = std::fs::read(store.path("t0")).unwrap();
        let mut disk = Disk::open(vec![store.raw("base", &base)], Some(template)).unwrap();
        let mut tops = vec!["t0".to_string()];
        for step in steps {
            match step {
                Step::Write(at, len, byte) => {
                    put(&mut disk, at * 512, &vec![byte; len as usize * 512]);
                    model[at as usize * 512..(at + len) as usize * 512].fill(byte);
                }
                Step::Zero(at, len, unmap) => {
                    disk.write_zeroes(at * 512, len * 512, unmap).unwrap();
                    model[at as usize * 512..(at + len) as usize * 512].fill(0);
                }
                Step::Discard(at, len) => {
                    disk.discard(at * 512, len * 512).unwrap();
                    let start = (at * 512).div_ceil(CLUSTER) * CLUSTER;
                    let end = (at + len) * 512 / CLUSTER * CLUSTER;
                    if start < end {
                        model[start as usize..end as usize].fill(0);
                    }
                }
                Step::Switch if tops.len() < 20 => {
                    let name = format!("t{}", tops.len());
                    std::fs::write(store.path(&name), &empty).unwrap();
                    let file = File::options().read(true).write(true).open(store.path(&name)).unwrap();
                    switch(&mut disk, file).unwrap();
                    tops.push(name);
                }
                Step::Switch => {}
                Step::Flush => disk.flush().unwrap(),
            }
        }
        prop_assert_eq!(whole(&disk, 0, SMALL as usize) == model, true);
        disk.flush().unwrap();
        let mut chain = vec![("base", "raw")];
        chain.extend(tops.iter().map(|name| (name.as_str(), "qcow2")));
        prop_assert_eq!(store.contents(&chain) == model, true);
        store.check(tops.last().unwrap());
    }
}

#[test]
fn a_state_of_another_disk_is_refused() {
    let (store, smaller) = (Store::new(8 * MIB), Store::new(4 * MIB));
    let disk = |store: &Store| Disk::open(vec![store.raw("base", &[])], Some(store.top("t"))).unwrap();
    let mut driver = Driver::new(Block::new(disk(&store), "disk0"));
    let state = driver.frozen();
    assert!(driver.thawed(Block::new(disk(&store), "disk0"), &state).is_ok());
    let field = |result: Result<Driver<Block>, StateError>| match result.err() {
        Some(StateError::Field { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(driver.thawed(Block::new(disk(&smaller), "disk0"), &state)), "bytes");
    let sized = store.raw("sized", &vec![0; 8 << 20]);
    let read_only = Disk::open(vec![sized], None).unwrap();
    // It offers fewer features already.
    assert_eq!(field(driver.thawed(Block::new(read_only, "disk0"), &state)), "driver_features");
}
