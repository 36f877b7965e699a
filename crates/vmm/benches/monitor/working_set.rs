//! Whether it would help to make the pages present that a copy of a stored machine touches first
//! (RFD 010).
//!
//! A memory file is mapped, as a load does; a copy is forked off, gets a virtual machine, and its
//! guest touches 8 MiB. With and without [`GuestRam::populate`] of just these pages, which is as
//! good as a recording can be; page cache warm and cold.

use super::{Report, ms, tiny};
use crate::monitor::TestHost;
use keiki_hv::{GuestRam, Kvm};
use serde_json::json;
use std::{fs::File, ops::Range, os::fd::AsFd, os::unix::fs::FileExt, time::Instant};

const MIB: u64 = 256;
/// Pages that are touched.
const PAGES: u64 = 2048;
/// The first of them.
const FIRST: u64 = 16 << 20;

/// Touches [`PAGES`] pages with a distance of so many bytes, reading or writing, then a port.
fn toucher(distance: u64, write: bool) -> Vec<u8> {
    let end = FIRST + PAGES * distance;
    let mut code = vec![0xbf];
    code.extend((FIRST as u32).to_le_bytes()); // mov edi, FIRST
    code.extend(if write { [0xff, 0x07] } else { [0x8b, 0x07] }); // inc dword [edi], or mov eax, [edi]
    code.extend([0x81, 0xc7]);
    code.extend((distance as u32).to_le_bytes()); // add edi, distance
    code.extend([0x81, 0xff]);
    code.extend((end as u32).to_le_bytes()); // cmp edi, end
    code.extend([0x72, 0xf0]); // jb the access
    code.extend([0xe7, 0x10]); // out 0x10, eax
    code.extend([0xeb, 0xfe]); // jmp here
    code
}

/// What is done at the load: pages are made present, or the kernel is told to read them and not
/// waited for.
#[derive(Clone, Copy, PartialEq)]
enum Ahead {
    Nothing,
    Populate,
    PopulateAll,
    Read,
    ReadAll,
}

const AHEAD: [(Ahead, &str); 5] = [
    (Ahead::Nothing, "nothing"),
    (Ahead::Populate, "recorded present"),
    (Ahead::PopulateAll, "all present"),
    (Ahead::Read, "recorded read"),
    (Ahead::ReadAll, "all read"),
];

fn drop_cache(file: &File) {
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

pub fn measure(host: &TestHost, report: &mut Report) {
    let file = File::options().read(true).write(true).create_new(true).open(host.path("ws")).unwrap();
    let block: Vec<u8> = (0..1 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    (0..MIB).for_each(|mib| file.write_all_at(&block, mib << 20).unwrap());
    let kvm = Kvm::open().unwrap();
    for (shape, distance) in [("together", 4096), ("apart", 28 * 4096)] {
        for write in [false, true] {
            for cold in [false, true] {
                for (ahead, name) in AHEAD {
                    let (mut load, mut copy, mut both) = (Vec::new(), Vec::new(), Vec::new());
                    for _ in 0..9 {
                        if cold {
                            drop_cache(&file);
                        }
                        let (loaded, ran) = once(&kvm, &file, distance, write, ahead);
                        load.push(loaded);
                        copy.push(ran);
                        both.push(loaded + ran);
                    }
                    let params = json!({"pages": PAGES, "where": shape, "written": write, "cache": if cold { "cold" } else { "warm" },
                        "ahead": name, "memory_mib": MIB});
                    report.add("working_set_load", "ms", params.clone(), load);
                    report.add("working_set_copy", "ms", params.clone(), copy);
                    report.add("working_set_both", "ms", params, both);
                }
            }
        }
    }
}

/// Milliseconds of the load, and of the copy from the fork until its guest has touched everything.
fn once(kvm: &Kvm, file: &File, distance: u64, write: bool, ahead: Ahead) -> (f64, f64) {
    let started = Instant::now();
    let ram = GuestRam::over(file).unwrap();
    let recorded = || -> Vec<Range<u64>> {
        (0..PAGES).map(|n| FIRST + n * distance..FIRST + n * distance + 4096).collect()
    };
    let all: Vec<_> = std::iter::once(0..MIB << 20).collect();
    match ahead {
        Ahead::Nothing => Ok(()),
        Ahead::Populate => ram.populate(&recorded()),
        Ahead::PopulateAll => ram.populate(&all),
        Ahead::Read => ram.read_ahead(&recorded()),
        Ahead::ReadAll => ram.read_ahead(&all),
    }
    .unwrap();
    let load = ms(started.elapsed());
    let started = Instant::now();
    let done = tiny::in_child(&[kvm.as_fd()], || {
        let (vm, mut vcpus, _) = tiny::machine(kvm, &ram, &toucher(distance, write), 1);
        let log = tiny::Log::default();
        while vcpus[0].run(&log) != keiki_hv::Exit::Served {}
        let took = ms(started.elapsed());
        std::mem::forget((vm, vcpus));
        took.to_le_bytes().to_vec()
    });
    (load, f64::from_le_bytes(done.expect("the copy failed").try_into().unwrap()))
}
