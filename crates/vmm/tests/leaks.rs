//! Many cycles and many generations: nothing is left over and nothing grows.

mod monitor;

use monitor::{Monitor, SILENT, TestHost, USER, host, until};
use std::{collections::BTreeSet, fs, path::PathBuf};

/// All of it with `KEIKI_TEST_ALL`, a tenth otherwise.
fn many(all: usize) -> usize {
    if std::env::var_os("KEIKI_TEST_ALL").is_some() { all } else { all / 10 }
}

/// Descriptors, threads, mappings, and KiB of heap.
#[derive(Debug, Clone, Copy)]
struct Size {
    fds: usize,
    threads: usize,
    maps: usize,
    heap_kib: usize,
}

fn size(monitor: &Monitor) -> Size {
    let proc = PathBuf::from(format!("/proc/{}", monitor.pid()));
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    };
    Size {
        fds: fs::read_dir(proc.join("fd")).unwrap().count(),
        threads: field("Threads:"),
        maps: fs::read_to_string(proc.join("maps")).unwrap().lines().count(),
        heap_kib: field("VmData:"),
    }
}

/// The monitors of this test: processes whose standard error is its file.
fn monitors(host: &TestHost) -> BTreeSet<u32> {
    let log = host.dir.path().join("stderr");
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| fs::read_link(format!("/proc/{pid}/fd/2")).is_ok_and(|to| to == log)).collect()
}

/// How many virtual machines these processes hold.
fn machines(pids: &BTreeSet<u32>) -> usize {
    let links = |pid: &u32| fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let open = pids.iter().flat_map(links).filter_map(|entry| fs::read_link(entry.path()).ok());
    open.filter(|to| to.to_string_lossy().contains("kvm-vm")).count()
}

#[test]
fn cycles_leave_nothing() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    let mut first = None;
    for cycle in 0..many(2000) {
        let (mut zygote, _) = host.freeze(&mut machine);
        let copy = host.thaw(&mut zygote);
        copy.counts();
        if cycle % 2 == 0 {
            copy.kill();
            zygote.kill();
        } else {
            zygote.close();
            copy.kill();
        }
        // The chain would become too long, so a flattened one replaces it, as in a node.
        let bottom = host.dir.path().join("bottom.raw");
        host.flatten(&mut machine, &bottom);
        if cycle == 5 {
            first = Some((size(&machine), machine.pid()));
        }
    }
    machine.counts();
    let (before, after) = (first.unwrap().0, size(&machine));
    assert_eq!((before.fds, before.threads), (after.fds, after.threads));
    assert!(after.maps <= before.maps + 4, "{before:?} {after:?}");
    assert!(after.heap_kib <= before.heap_kib + 2048, "{before:?} {after:?}");
    until("only the machine is left", || monitors(&host) == BTreeSet::from([machine.pid()]));
    assert_eq!(machines(&monitors(&host)), 1);
}

#[test]
fn depth_costs_nothing() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    let mut sizes = Vec::new();
    let depth = many(250);
    for generation in 0..depth {
        machine.counts();
        let (mut zygote, _) = host.freeze(&mut machine);
        zygote.files.as_mut().unwrap().layers.truncate(1);
        let next = host.thaw(&mut zygote);
        // The ancestors end, in either order.
        if generation % 2 == 0 {
            machine.kill();
            zygote.kill();
        } else {
            zygote.kill();
            machine.kill();
        }
        machine = next;
        sizes.push(size(&machine));
    }
    machine.counts();
    let (before, after) = (sizes[5], sizes[depth - 1]);
    assert_eq!((before.fds, before.threads), (after.fds, after.threads));
    // Each generation leaves the forgotten objects of its parent in the copy. That is bounded, and
    // the node starts a new lineage after some dozens.
    let grown = after.heap_kib.saturating_sub(before.heap_kib) / (depth - 5);
    println!("each generation leaves {grown} KiB and {} mappings", (after.maps - before.maps) / (depth - 5));
    assert!(grown < 512, "{before:?} {after:?}");
    until("only the machine is left", || monitors(&host) == BTreeSet::from([machine.pid()]));
    assert_eq!(machines(&monitors(&host)), 1);
    let status = fs::read_to_string(format!("/proc/{}/status", machine.pid())).unwrap();
    if rustix::process::geteuid().is_root() {
        assert!(status.contains("Seccomp_filters:\t2\n") && status.contains(&USER.to_string()), "{status}");
    }
}
