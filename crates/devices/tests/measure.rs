//! What the disk format costs against a plain file. By hand, optimised:
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

/// Where the n-th small access goes.
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
        let begun = Instant::now();
        disk.switch_top(new).unwrap();
        worst = worst.max(begun.elapsed());
    }
    println!("switch of the top, the slowest of 32: {worst:?}");
    time("32 deeper: read 4 KiB", "1/s", COUNT as f64, || {
        (0..COUNT).for_each(|nth| disk.read(&[VolatileSlice::from(&mut small[..])], place(nth)).unwrap());
    });
}
