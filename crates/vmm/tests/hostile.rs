//! Misbehaving guests and impossible requests: the monitor continues, or says why it cannot.

mod monitor;

use keiki_control::{Reply, Request};
use monitor::{COUNT, Monitor, SILENT, host, until};
use std::fs;

/// Writes to, and reads from, many addresses of the first device windows and what lies behind them;
/// then the same for all ports, bytes, words and double words. Counts its rounds.
#[rustfmt::skip]
const EVERYWHERE: &[u8] = &[
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00,             // inc dword [COUNT]
    0xbf, 0x00, 0x00, 0x00, 0xc0,                   // mov edi, 0xc0000000
    0x89, 0x1f,                                     // mov [edi], ebx
    0x8b, 0x07,                                     // mov eax, [edi]
    0x88, 0x5f, 0x01,                               // mov [edi + 1], bl
    0x66, 0x8b, 0x47, 0x03,                         // mov ax, [edi + 3]
    0x8b, 0x47, 0xfe,                               // mov eax, [edi - 2]
    0x83, 0xc7, 0x34,                               // add edi, 52
    0x83, 0xc3, 0x07,                               // add ebx, 7
    0x81, 0xff, 0x00, 0x70, 0x00, 0xc0,             // cmp edi, 0xc0007000
    0x72, 0xe4,                                     // jb the first write
    0x31, 0xd2,                                     // xor edx, edx
    0xec,                                           // in al, dx
    0xed,                                           // in eax, dx
    0x30, 0xc0,                                     // xor al, al
    0xee,                                           // out dx, al
    0x66, 0xef,                                     // out dx, ax
    0x66, 0xed,                                     // in ax, dx
    0x42,                                           // inc edx
    0x81, 0xfa, 0x00, 0x08, 0x00, 0x00,             // cmp edx, 0x800
    0x72, 0xee,                                     // jb the first in
    0xeb, 0xc3,                                     // jmp the beginning
];

/// Writes to the console without end, in strings of 64 KiB.
#[rustfmt::skip]
const FLOOD: &[u8] = &[
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00,             // inc dword [COUNT]
    0xbe, 0x00, 0x00, 0x10, 0x00,                   // mov esi, 1 MiB
    0xb9, 0x00, 0x00, 0x01, 0x00,                   // mov ecx, 64 KiB
    0x66, 0xba, 0xf8, 0x03,                         // mov dx, 0x3f8
    0xf3, 0x6e,                                     // rep outsb
    0xeb, 0xe8,                                     // jmp the beginning
];

fn hello(machine: &mut Monitor) {
    let Reply::Hello(hello) = machine.call(&Request::Hello) else { panic!() };
    assert_eq!(hello.layers, 1);
}

#[test]
fn a_guest_that_touches_everything_does_no_harm() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(EVERYWHERE);
    until("a round", || machine.peek(COUNT) > 1);
    hello(&mut machine);
    // A copy has the same device state, whatever it is now.
    let (mut zygote, _) = host.freeze(&mut machine);
    host.thaw(&mut zygote).counts();
    machine.counts();
    machine.kill();
}

#[test]
fn a_flood_on_the_console_stops_nothing() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(FLOOD);
    let console = machine.files.as_ref().unwrap().console.clone();
    let len = || fs::metadata(&console).unwrap().len();
    until("it floods", || len() > 20_000);
    hello(&mut machine);
    assert!(len() <= 256 << 10);
    let (mut zygote, _) = host.freeze(&mut machine);
    let copy = host.thaw(&mut zygote);
    until("the copy floods", || fs::metadata(&copy.files.as_ref().unwrap().console).unwrap().len() > 5000);
    assert_eq!(machine.call(&Request::Pause), Reply::Done);
}

#[test]
fn a_freeze_that_fails_leaves_the_machine_as_it_was() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    // A file that is not a top. Whenever this is found, nothing of the attempt is left.
    let bad = host.path("bad");
    fs::write(&bad, vec![7; 300_000]).unwrap();
    let error = host.try_freeze(&mut machine, &bad).err().expect("it was taken").to_string();
    assert!(error.contains("qcow2"), "{error}");
    machine.counts();
    hello(&mut machine);
    let count = || {
        let log = host.dir.path().join("stderr");
        let pids =
            fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().into_string().ok());
        pids.filter(|pid| fs::read_link(format!("/proc/{pid}/fd/2")).is_ok_and(|to| to == log)).count()
    };
    until("the zygote is gone", || count() == 1);
    // A valid request still works.
    let (mut zygote, _) = host.freeze(&mut machine);
    host.thaw(&mut zygote).counts();
}

#[test]
fn no_room_for_another_process_is_said() {
    let Some(host) = host() else { return };
    if !keiki_testing::is_root() {
        return;
    }
    // The machine, its vCPU, what KVM adds, and a few zygotes.
    let blank = host.blank_as(1_262_100_777, 7);
    let mut machine = host.boot_in(blank, SILENT, 1, 16).unwrap();
    let top = host.path("top");
    let mut zygotes = Vec::new();
    let error = loop {
        fs::write(&top, monitor::overlay::empty_overlay(monitor::DISK)).unwrap();
        match host.try_freeze(&mut machine, &top) {
            Ok((zygote, _)) => zygotes.push(zygote),
            Err(error) => break error.to_string(),
        }
        host.flatten(&mut machine, &host.dir.path().join("bottom.raw"));
        assert!(zygotes.len() < 8, "no limit is kept");
    };
    assert!(error.starts_with("forking: "), "{error}");
    let mut zygote = zygotes.pop().unwrap();
    zygote.files.as_mut().unwrap().layers.truncate(1);
    let error = host.try_thaw(&mut zygote).err().expect("it was taken").to_string();
    assert!(error.starts_with("forking: "), "{error}");
    machine.counts();
    machine.kill();
    zygotes.iter().for_each(Monitor::kill);
    // Without the others there is room for a process and its vCPU thread.
    host.thaw(&mut zygote).counts();
}

/// A machine can freeze while an earlier freeze is being written, and both are correct.
#[test]
fn a_persist_disturbs_nothing_else() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    machine.counts();
    for page in 0..2000 {
        machine.poke(0x10_0000 + 0x10_0000 + page * 4096, page as u32 + 1);
    }
    let (mut zygote, _) = host.freeze(&mut machine);
    let stored = host.to_store(&zygote, 16);
    let own = zygote.pid();
    host.begin_persist(&mut zygote, &stored, own);
    for round in 0..3 {
        machine.poke(0x20_0000, 7000 + round);
        let (mut another, _) = host.freeze(&mut machine);
        let copy = host.thaw(&mut another);
        assert_eq!(copy.peek(0x20_0000), 7000 + round);
        copy.counts();
    }
    let answer = zygote.client.answer(monitor::PATIENCE).unwrap().reply;
    assert!(matches!(answer, Reply::Persisted(persisted) if persisted.pages >= 2000));
    let memory = fs::read(&stored.memory).unwrap();
    for page in 0..2000_usize {
        let at = 0x20_0000 + page * 4096;
        assert_eq!(memory[at..at + 4], (page as u32 + 1).to_le_bytes(), "page {page}");
    }
}
