//! Finding 4: memory moves between relatives, but not between control groups. So a lineage has one
//! control group, as large as its worst case, and a parent survives that rewrites all its memory
//! beside its zygotes.

mod monitor;

use monitor::{SILENT, host};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A memory control group that goes away.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Option<Self> {
        for (root, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let group = Self(Path::new(root).join(format!("keiki-test-{}", std::process::id())));
            if fs::create_dir(&group.0).is_ok() && fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                return Some(group);
            }
        }
        keiki_testing::skip("memory-group", "no memory control group can be made here");
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..100 {
            match fs::remove_dir(&self.0) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                _ => return,
            }
        }
    }
}

#[test]
fn a_lineage_within_its_worst_case_lives() {
    let Some(host) = host() else { return };
    const MIB: u64 = 64;
    // The memory of three machines, and what processes need besides.
    let Some(group) = Group::new((3 * MIB + 24) << 20) else { return };
    let blank = host.blank();
    fs::write(group.0.join("cgroup.procs"), blank.pid().to_string()).unwrap();
    let mut machine = host.boot_in(blank, SILENT, 1, 64).unwrap();
    machine.remember_ram(MIB);
    let write_all = |machine: &monitor::Monitor, value: u32| {
        use std::os::unix::fs::FileExt;
        let (mem, start) = (machine.mem(), machine.ram.unwrap());
        // Behind the code of the guest.
        for page in (2 << 20..MIB << 20).step_by(4096) {
            mem.write_all_at(&value.to_le_bytes(), start + page).unwrap();
        }
    };
    write_all(&machine, 1);
    let mut zygotes = Vec::new();
    for round in 2..4 {
        zygotes.push(host.freeze(&mut machine).0);
        write_all(&machine, round);
    }
    let usage = ["memory.usage_in_bytes", "memory.current"];
    let usage = usage.iter().find_map(|file| fs::read_to_string(group.0.join(file)).ok()).unwrap();
    let usage = usage.trim().parse::<u64>().unwrap();
    assert!(usage > (3 * MIB - 8) << 20, "the group does not hold the lineage: {usage}");
    assert!(machine.lives() && zygotes.iter().all(monitor::Monitor::lives));
    for (zygote, value) in zygotes.iter_mut().zip(1..) {
        zygote.ram = machine.ram;
        assert_eq!(zygote.peek_at(40 << 20), value);
    }
    machine.kill();
    zygotes.iter().for_each(monitor::Monitor::kill);
    drop(zygotes);
    drop(group);
}
