//! Copies beside each other: what a zygote does at once, and what a freeze must not copy.

mod monitor;

use keiki_control::{Client, ControlError, Reply, Request, Role, Shape};
use monitor::{COUNT, Monitor, PATIENCE, Place, SILENT, Stored, borrow, place, thaw_request, until};
use std::{fs::File, os::fd::OwnedFd, os::unix::fs::FileExt, time::Duration};

const MIB: u64 = 512;
/// Behind the guest's code and count.
const DIRTY: std::ops::Range<u64> = 2 << 20..500 << 20;

fn read_write(path: &std::path::Path) -> OwnedFd {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap().into()
}

/// A zygote of a machine of which much would have to be written.
fn large(place: &Place) -> (Monitor, Monitor) {
    let mut machine = place.try_boot(SILENT, 1, 512).unwrap();
    machine.remember_ram(MIB);
    let page = vec![0x5a; 1 << 20];
    for at in DIRTY.step_by(1 << 20) {
        machine.mem().write_all_at(&page, machine.ram.unwrap() + at).unwrap();
    }
    let (mut zygote, _) = place.freeze(&mut machine);
    zygote.ram = machine.ram;
    (machine, zygote)
}

/// What is written is of the zygote's instant, and it makes machines meanwhile.
#[test]
fn a_zygote_that_is_written_down_makes_machines() {
    let Some(place) = place() else { return };
    let (_machine, mut zygote) = large(&place);
    let stored = Stored {
        memory: place.path("mem"),
        state: place.path("state"),
        digest: [0; 32],
        layers: zygote.files.as_ref().unwrap().layers.clone(),
        shape: Shape { vcpus: 1, memory_mib: 512 },
    };
    let (mut writer, theirs) = Client::pair().unwrap();
    let fds = [
        (Role::Memory, read_write(&stored.memory)),
        (Role::State, read_write(&stored.state)),
        (Role::Pagemap, File::open(format!("/proc/{}/pagemap", zygote.pid())).unwrap().into()),
        (Role::Control, theirs),
    ];
    let answer = zygote.client.call(&Request::Persist, &borrow(&fds), PATIENCE).unwrap();
    drop(fds);
    assert_eq!((answer.reply, answer.pid), (Reply::Done, zygote.pid()));
    let copy = place.thaw(&mut zygote);
    let early = writer.answer(Duration::from_millis(1));
    assert!(matches!(early, Err(ControlError::TimedOut)), "the thaw waited for the file: {early:?}");
    let answer = writer.answer(PATIENCE).unwrap();
    let Reply::Persisted(persisted) = answer.reply else { panic!("{:?}", answer.reply) };
    assert_ne!(answer.pid, zygote.pid(), "the zygote wrote by itself");
    assert!(persisted.pages >= (DIRTY.end - DIRTY.start) / 4096, "{persisted:?}");
    copy.kill();
    let loaded = place.load(&Stored { digest: persisted.digest, ..stored });
    let mut byte = [0];
    loaded.mem().read_exact_at(&mut byte, loaded.ram_start_of(MIB) + DIRTY.start).unwrap();
    assert_eq!(byte, [0x5a]);
}

/// Each answers where it was told to, and complains where it was told to.
#[test]
fn machines_are_made_at_once_each_with_its_own_connection() {
    let Some(place) = place() else { return };
    let (_machine, mut zygote) = large(&place);
    let mut begun = Vec::new();
    for _ in 0..4 {
        let (client, theirs) = Client::pair().unwrap();
        let (ours, stderr) = std::io::pipe().unwrap();
        let (files, mut fds) = place.copy_files(&zygote);
        fds.extend([(Role::Control, theirs), (Role::Stderr, stderr.into())]);
        let reply = zygote.client.call(&thaw_request(), &borrow(&fds), PATIENCE).unwrap().reply;
        assert_eq!(reply, Reply::Done);
        begun.push((client, files, ours));
    }
    let mut pids = std::collections::BTreeSet::new();
    for (mut client, files, ours) in begun {
        let answer = client.answer(PATIENCE).unwrap();
        let Reply::Thawed(thawed) = answer.reply else { panic!("{:?}", answer.reply) };
        assert_eq!(answer.pid, thawed.pid);
        pids.insert(thawed.pid);
        let pipe = |path: String| std::fs::read_link(path).unwrap();
        let here = std::os::fd::AsRawFd::as_raw_fd(&ours);
        assert_eq!(pipe(format!("/proc/{}/fd/2", thawed.pid)), pipe(format!("/proc/self/fd/{here}")));
        place.adopt(thawed.pid, files).kill();
    }
    assert_eq!(pids.len(), 4);
}

/// Counts to [`LAST`] and switches the machine off.
#[rustfmt::skip]
const COUNT_AND_END: &[u8] = &[
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00,                         // inc dword [COUNT]
    0x81, 0x3d, 0x00, 0x20, 0x00, 0x00, 0x60, 0xea, 0x00, 0x00, // cmp dword [COUNT], LAST
    0x72, 0xee,                                                 // jb the beginning
    0x66, 0xba, 0x00, 0x06,                                     // mov dx, 0x600
    0xb0, 0x34,                                                 // mov al, sleep now, type 5
    0xee,                                                       // out dx, al
    0xeb, 0xfe,                                                 // jmp here
];
const LAST: u32 = 60_000;

/// A guest that ends while its machine is being frozen: a copy of it ends too, or there is none.
#[test]
fn no_copy_is_of_a_machine_that_has_ended() {
    let Some(place) = place() else { return };
    let (mut frozen, mut refused) = (0, 0);
    for round in 0..20 {
        let mut machine = place.boot(COUNT_AND_END);
        machine.remember_ram(16);
        // The freeze flushes the disk before it stops the vCPUs. This makes that long.
        let disk = File::options().write(true).open(machine.files.as_ref().unwrap().layers.last().unwrap());
        disk.unwrap().write_all_at(&vec![1; 32 << 20], 1 << 30).unwrap();
        let top = place.path("top");
        std::fs::copy(place.dir.path().join("empty.qcow2"), &top).unwrap();
        // What it does in a few milliseconds: somewhere in there is the freeze.
        let before = LAST - 250 * round;
        let (mem, at) = (machine.mem(), machine.ram.unwrap() + COUNT);
        let mut count = [0; 4];
        // Until it is there, or was there and is gone.
        while mem.read_exact_at(&mut count, at).is_ok() && u32::from_le_bytes(count) < before {}
        match place.try_freeze(&mut machine, &top) {
            Ok((mut zygote, _)) => {
                frozen += 1;
                let copy = place.thaw(&mut zygote);
                until("the copy ends as its original did", || copy.process.try_reap().is_some());
            }
            Err(ControlError::Failed { sentence, .. }) => {
                assert_eq!(sentence, "its guest has just ended");
                refused += 1;
            }
            // It had ended before it was asked.
            Err(ControlError::Closed) => {}
            Err(other) => panic!("{other}"),
        }
        machine.wait();
    }
    println!("{frozen} frozen, {refused} refused");
}
