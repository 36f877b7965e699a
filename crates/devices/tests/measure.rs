//! The cost of the disk format against a plain file. Run by hand, optimised:
//! `cargo test --release -p keiki-devices --test measure -- --ignored --nocapture`

use keiki_devices::disk::{Disk, Format, Layer};
use std::{
    fs::File,
    os::unix::fs::FileExt,
    process::Command,
    time::{Duration, Instant},
};
use vm_memory::VolatileSlice;

const BYTES: u64 = 512 << 20;
const SMALL: usize = 4096;
const COUNT: u64 = 20_000;

/// Offset of the n-th small access.
fn place(nth: u64) -> u64 {
    nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (BYTES / SMALL as u64) * SMALL as u64
}

fn time(what: &str, unit: &str, amount: f64, work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    let took = begun.elapsed();
    println!("{what:<28} {:>9.0} {unit}", amount / took.as_secs_f64());
    took
}

#[test]
#[ignore = "a measurement"]
fn a_chain_against_a_plain_file() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain");
    let plain = File::options().read(true).write(true).create_new(true).open(plain).unwrap();
    plain.set_len(BYTES).unwrap();
    let mut large = vec![7_u8; 1 << 20];
    let mut small = vec![8_u8; SMALL];
    let mib = (BYTES >> 20) as f64;
    time("plain: write 1 MiB", "MiB/s", mib, || {
        (0..BYTES).step_by(1 << 20).for_each(|at| plain.write_all_at(&large, at).unwrap());
    });
    time("plain: write 4 KiB", "1/s", COUNT as f64, || {
        (0..COUNT).for_each(|nth| plain.write_all_at(&small, place(nth)).unwrap());
    });
    time("plain: read 4 KiB", "1/s", COUNT as f64, || {
        (0..COUNT).for_each(|nth| plain.read_exact_at(&mut small, place(nth)).unwrap());
    });
    time("plain: read 1 MiB", "MiB/s", mib, || {
        (0..BYTES).step_by(1 << 20).for_each(|at| plain.read_exact_at(&mut large, at).unwrap());
    });
    let top = |name: &str| {
        let path = dir.path().join(name);
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=64k", path.to_str().unwrap()])
            .arg(BYTES.to_string())
            .status();
        assert!(made.unwrap().success());
        File::options().read(true).write(true).open(path).unwrap()
    };
    let base = Layer { format: Format::Raw, file: plain };
    let mut disk = Disk::open(vec![base], Some(top("top"))).unwrap();
    time("chain: first write 4 KiB", "1/s", COUNT as f64 / 10.0, || {
        (0..COUNT / 10)
            .for_each(|nth| disk.write(&[VolatileSlice::from(&mut small[..])], place(nth)).unwrap());
    });
    time("chain: write 1 MiB", "MiB/s", mib, || {
        (0..BYTES)
            .step_by(1 << 20)
            .for_each(|at| disk.write(&[VolatileSlice::from(&mut large[..])], at).unwrap());
    });
    time("chain: write 4 KiB", "1/s", COUNT as f64, || {
        (0..COUNT).for_each(|nth| disk.write(&[VolatileSlice::from(&mut small[..])], place(nth)).unwrap());
    });
    time("chain: read 4 KiB", "1/s", COUNT as f64, || {
        (0..COUNT).for_each(|nth| disk.read(&[VolatileSlice::from(&mut small[..])], place(nth)).unwrap());
    });
    time("chain: read 1 MiB", "MiB/s", mib, || {
        (0..BYTES)
            .step_by(1 << 20)
            .for_each(|at| disk.read(&[VolatileSlice::from(&mut large[..])], at).unwrap());
    });
    time("chain: flush", "1/s", 1.0, || disk.flush().unwrap());
    let mut worst = Duration::ZERO;
    for depth in 0..32 {
        let new = top(&format!("top{depth}"));
        disk.write(&[VolatileSlice::from(&mut small[..])], place(depth)).unwrap();
        let new = disk.prepare_top(new).unwrap();
        let begun = Instant::now();
        disk.switch_top(new).unwrap();
        worst = worst.max(begun.elapsed());
    }
    println!("switch of the top, the slowest of 32: {worst:?}");
    time("32 deeper: read 4 KiB", "1/s", COUNT as f64, || {
        (0..COUNT).for_each(|nth| disk.read(&[VolatileSlice::from(&mut small[..])], place(nth)).unwrap());
    });
}

/// The cost of the devices of a thaw.
#[test]
#[ignore = "a measurement"]
fn making_devices() {
    let dir = tempfile::tempdir().unwrap();
    let make = |name: &str| {
        let path = dir.path().join(name);
        let made =
            Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("2G").status();
        assert!(made.unwrap().success());
        path
    };
    std::fs::write(dir.path().join("base"), vec![1; 1 << 20]).unwrap();
    let overlays: Vec<_> = (0..9).map(|nth| make(&format!("t{nth}"))).collect();
    let open = |depth: usize| {
        let base = Layer { format: Format::Raw, file: File::open(dir.path().join("base")).unwrap() };
        let mut lower = vec![base];
        let overlay = |path| Layer { format: Format::Qcow2, file: File::open(path).unwrap() };
        lower.extend(overlays[..depth].iter().map(overlay));
        let top = File::options().read(true).write(true).open(&overlays[8]).unwrap();
        Disk::open(lower, Some(top)).unwrap()
    };
    let rounds = 200.0;
    for depth in [0, 1, 8] {
        time(&format!("disk over {depth} overlays"), "1/s", rounds, || {
            (0..200).for_each(|_| drop(open(depth)))
        });
    }
    time("entropy", "1/s", rounds, || (0..200).for_each(|_| drop(keiki_devices::rng::Rng::new().unwrap())));
    time("network", "1/s", rounds, || {
        (0..200).for_each(|_| drop(keiki_devices::net::Net::new(None, [0; 6]).unwrap()));
    });
    let memory = keiki_devices::Memory::from_ranges(&[(vm_memory::GuestAddress(0), 1 << 20)]).unwrap();
    time("transport", "1/s", rounds, || {
        (0..200).for_each(|_| {
            let device = keiki_devices::rng::Rng::new().unwrap();
            let line = Box::new(keiki_devices::Event::new().unwrap());
            drop(keiki_devices::mmio::Mmio::new(device, memory.clone(), line).unwrap());
        });
    });
}
