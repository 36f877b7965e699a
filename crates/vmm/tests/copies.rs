//! Copies beside each other: what a zygote does at once, and what a freeze must not copy.

mod monitor;

use keiki_control::{Client, ControlError, Freeze, Reply, Request, Role, Shape};
use keiki_sys::process::Process;
use monitor::{Monitor, PATIENCE, Place, SILENT, Stored, borrow, place, thaw_request, until};
use std::{
    fs::File,
    os::fd::OwnedFd,
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};

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
    // The copy that writes is held where it is: whoever waits for it waits for ever.
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", zygote.pid())).unwrap();
    let held = rustix::process::Pid::from_raw(children.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(held, rustix::process::Signal::STOP).unwrap();
    let copy = place.thaw(&mut zygote);
    let early = writer.answer(Duration::from_millis(1));
    assert!(matches!(early, Err(ControlError::TimedOut)), "the thaw waited for the file: {early:?}");
    rustix::process::kill_process(held, rustix::process::Signal::CONT).unwrap();
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

/// Where the guest is told to end.
const FLAG: u64 = 0x3000;
/// Waits until it is told to, and switches the machine off.
#[rustfmt::skip]
const END_WHEN_TOLD: &[u8] = &[
    0x83, 0x3d, 0x00, 0x30, 0x00, 0x00, 0x00, // cmp dword [FLAG], 0
    0x74, 0xf7,                               // je the beginning
    0x66, 0xba, 0x00, 0x06,                   // mov dx, 0x600
    0xb0, 0x34,                               // mov al, sleep now, type 5
    0xee,                                     // out dx, al
    0xeb, 0xfe,                               // jmp here
];

/// A guest that ends while its machine is being frozen: a copy of it ends too, or there is none.
#[test]
fn no_copy_is_of_a_machine_that_has_ended() {
    let Some(place) = place() else { return };
    let (mut frozen, mut refused) = (0, 0);
    for round in 0..120 {
        let mut machine = place.boot(END_WHEN_TOLD);
        machine.remember_ram(16);
        let top = place.path("top");
        std::fs::copy(place.dir.path().join("empty.qcow2"), &top).unwrap();
        let (client, theirs) = Client::pair().unwrap();
        let fds = [(Role::Control, theirs), (Role::Top, read_write(&top))];
        let mem = machine.mem();
        machine.client.ask(&Request::Freeze(Freeze {}), &borrow(&fds)).unwrap();
        drop(fds);
        // Somewhere in between it is asked, parks its vCPU, and is copied.
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_micros(10 * (round % 40)) {}
        let at = machine.ram.unwrap() + FLAG;
        mem.write_all_at(&[1], at).unwrap();
        match machine.client.answer(PATIENCE).map(|answer| answer.reply) {
            Ok(Reply::Frozen(made)) => {
                frozen += 1;
                let process = Process::open(made.pid).unwrap().unwrap();
                let mut files = machine.files.clone();
                files.as_mut().unwrap().layers.push(top);
                let mut zygote = Monitor { process, client, files, ram: machine.ram };
                let (_files, fds) = place.copy_files(&zygote);
                let answer = zygote.client.call(&thaw_request(), &borrow(&fds), PATIENCE).unwrap();
                let Reply::Thawed(thawed) = answer.reply else { panic!("{:?}", answer.reply) };
                // One that is of before has not been told; others may be gone.
                let copy = Process::open(thawed.pid).unwrap();
                let mem = File::options().write(true).open(format!("/proc/{}/mem", thawed.pid));
                let _ = mem.and_then(|mem| mem.write_all_at(&[1], at));
                let ended = || copy.as_ref().is_none_or(|copy| copy.try_reap().is_some());
                until("the copy ends as its original did", ended);
            }
            Err(ControlError::Failed { sentence, .. }) => {
                assert_eq!(sentence, "its guest has just ended");
                refused += 1;
            }
            // It had ended before it was asked.
            Err(ControlError::Closed) => {}
            other => panic!("{other:?}"),
        }
        machine.wait();
    }
    println!("{frozen} frozen, {refused} refused");
}
