//! Concurrent copies: what a zygote does at the same time, and what a freeze must not copy.

mod monitor;

use keiki_control::{Client, ControlError, Reply, Request, Role};
use keiki_sys::process::Process;
use monitor::{COUNT, Monitor, PATIENCE, SILENT, Stored, TestHost, borrow, host, thaw_request, until};
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

/// A zygote with much memory to write.
fn large(host: &TestHost) -> (Monitor, Monitor) {
    let mut machine = host.try_boot(SILENT, 1, 512).unwrap();
    machine.remember_ram(MIB);
    let page = vec![0x5a; 1 << 20];
    for at in DIRTY.step_by(1 << 20) {
        machine.mem().write_all_at(&page, machine.ram.unwrap() + at).unwrap();
    }
    let (mut zygote, _) = host.freeze(&mut machine);
    zygote.ram = machine.ram;
    (machine, zygote)
}

/// The files are of the instant of the zygote, which makes machines meanwhile.
#[test]
fn a_zygote_that_is_written_down_makes_machines() {
    let Some(host) = host() else { return };
    let (_machine, mut zygote) = large(&host);
    let stored = host.to_store(&zygote, 512);
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
    // The copy that writes is stopped, so its caller waits for ever.
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", zygote.pid())).unwrap();
    let held = rustix::process::Pid::from_raw(children.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(held, rustix::process::Signal::STOP).unwrap();
    let copy = host.thaw(&mut zygote);
    // It may have reported that it has begun.
    let early = writer.answer(Duration::from_millis(1));
    let has_begun = matches!(&early, Ok(answer) if answer.reply == Reply::Done);
    let early = if has_begun { writer.answer(Duration::from_millis(1)) } else { early };
    assert!(matches!(early, Err(ControlError::TimedOut)), "the thaw waited for the file: {early:?}");
    rustix::process::kill_process(held, rustix::process::Signal::CONT).unwrap();
    if !has_begun {
        assert_eq!(writer.answer(PATIENCE).unwrap().reply, Reply::Done, "it does not say that it has begun");
    }
    let answer = writer.answer(PATIENCE).unwrap();
    let Reply::Persisted(persisted) = answer.reply else { panic!("{:?}", answer.reply) };
    assert_ne!(answer.pid, zygote.pid(), "the zygote wrote by itself");
    assert!(persisted.pages >= (DIRTY.end - DIRTY.start) / 4096, "{persisted:?}");
    copy.kill();
    let loaded = host.load(&Stored { digest: persisted.digest, ..stored });
    let mut byte = [0];
    loaded.mem().read_exact_at(&mut byte, loaded.ram_start_of(MIB) + DIRTY.start).unwrap();
    assert_eq!(byte, [0x5a]);
}

/// Each copy answers and reports errors where it was told to.
#[test]
fn machines_are_made_at_once_each_with_its_own_connection() {
    let Some(host) = host() else { return };
    let (_machine, mut zygote) = large(&host);
    let mut begun = Vec::new();
    for _ in 0..4 {
        let (client, theirs) = Client::pair().unwrap();
        let (ours, stderr) = std::io::pipe().unwrap();
        let (files, mut fds) = host.copy_files(&zygote);
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
        host.adopt(thawed.pid, files).kill();
    }
    assert_eq!(pids.len(), 4);
}

/// Where the guest is told to end.
const FLAG: u64 = 0x3000;
/// Waits until it is told to, switches the machine off, and counts that.
#[rustfmt::skip]
const END_WHEN_TOLD: &[u8] = &[
    0x83, 0x3d, 0x00, 0x30, 0x00, 0x00, 0x00, // cmp dword [FLAG], 0
    0x74, 0xf7,                               // je the beginning
    0x66, 0xba, 0x00, 0x06,                   // mov dx, 0x600
    0xb0, 0x34,                               // mov al, sleep now, type 5
    0xee,                                     // out dx, al
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00,       // inc dword [COUNT]
    0xeb, 0xfe,                               // jmp here
];

/// A machine whose guest ends when it is told to.
fn ending(host: &TestHost) -> Monitor {
    let mut machine = host.boot(END_WHEN_TOLD);
    machine.remember_ram(16);
    machine
}

/// Requests a freeze. Returns the connection to its zygote, and the next top of its machine.
fn begin_freeze(host: &TestHost, machine: &mut Monitor) -> (Client, std::path::PathBuf) {
    let top = host.path("top");
    std::fs::copy(host.dir.path().join("empty.qcow2"), &top).unwrap();
    let (client, theirs) = Client::pair().unwrap();
    let fds = [(Role::Control, theirs), (Role::Top, read_write(&top))];
    machine.client.ask(&Request::Freeze, &borrow(&fds)).unwrap();
    (client, top)
}

fn is_told_to_end(machine: &Monitor) {
    machine.mem().write_all_at(&[1], machine.ram.unwrap() + FLAG).unwrap();
}

const REFUSED: &str = "its guest has just ended";

/// A traced main thread, which runs from system call to system call.
struct Traced(rustix::process::Pid);

impl Traced {
    /// Stops it wherever it is.
    fn of(monitor: &Monitor) -> Self {
        let traced = Self(rustix::process::Pid::from_raw(monitor.pid() as i32).unwrap());
        traced.ask(libc::PTRACE_SEIZE, 0, libc::PTRACE_O_TRACESYSGOOD as usize);
        traced.ask(libc::PTRACE_INTERRUPT, 0, 0);
        traced.stops();
        traced
    }

    /// Lets it run until it is about to make this call.
    fn runs_until(&self, call: libc::c_long) {
        let mut info = [0_u64; 16];
        // A byte that says at what the thread stands, and from the fourth word on the call.
        while info[0] as u8 != libc::PTRACE_SYSCALL_INFO_ENTRY || info[3] != call as u64 {
            self.ask(libc::PTRACE_SYSCALL, 0, 0);
            self.stops();
            let (size, at) = (size_of_val(&info), info.as_mut_ptr() as usize);
            self.ask(libc::PTRACE_GET_SYSCALL_INFO, size, at);
        }
    }

    fn stops(&self) {
        use rustix::process::{WaitOptions, waitpid};
        let (_, status) = waitpid(Some(self.0), WaitOptions::empty()).unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }

    #[allow(unsafe_code)]
    fn ask(&self, request: libc::c_uint, address: usize, data: usize) {
        // SAFETY: the requests above read nothing of ours, and write only where there is room for
        // what they write.
        let done = unsafe { libc::ptrace(request, self.0.as_raw_nonzero().get(), address, data) };
        assert!(done >= 0, "{}", std::io::Error::last_os_error());
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.ask(libc::PTRACE_DETACH, 0, 0);
        }
    }
}

/// The guest ends after the event loop has checked for it, and before the vCPUs are parked: there
/// is no copy.
#[test]
fn a_machine_that_ends_while_it_is_frozen_is_not_copied() {
    let Some(host) = host() else { return };
    let mut machine = ending(&host);
    let traced = Traced::of(&machine);
    let (client, _top) = begin_freeze(&host, &mut machine);
    traced.runs_until(libc::SYS_recvmsg);
    is_told_to_end(&machine);
    until("the guest has ended", || machine.peek_at(COUNT) == 1);
    drop(traced);
    let error = machine.client.answer(PATIENCE).unwrap_err();
    assert!(matches!(&error, ControlError::Failed { sentence, .. } if sentence == REFUSED), "{error:?}");
    machine.wait();
    assert!(machine.console().ends_with("keiki-vmm: guest-shutdown\n"), "{}", machine.console());
    let nobody = { client }.answer(PATIENCE).unwrap_err();
    assert!(matches!(nobody, ControlError::Closed), "a zygote: {nobody:?}");
}

/// The guest ends at any moment of a freeze: a copy of the machine ends too, or there is none.
#[test]
fn no_copy_is_of_a_machine_that_has_ended() {
    let Some(host) = host() else { return };
    let (mut copied, mut refused, mut gone) = (0, 0, 0);
    for round in 0..80 {
        let mut machine = ending(&host);
        let (client, top) = begin_freeze(&host, &mut machine);
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_micros(10 * (round % 40)) {}
        is_told_to_end(&machine);
        match machine.client.answer(PATIENCE).map(|answer| answer.reply) {
            Ok(Reply::Frozen(made)) => {
                copied += 1;
                let process = Process::open(made.pid).unwrap().unwrap();
                let mut files = machine.files.clone();
                files.as_mut().unwrap().layers.push(top);
                let mut zygote = Monitor { process, client, files, ram: machine.ram };
                let (_files, fds) = host.copy_files(&zygote);
                let answer = zygote.client.call(&thaw_request(), &borrow(&fds), PATIENCE).unwrap();
                let Reply::Thawed(thawed) = answer.reply else { panic!("{:?}", answer.reply) };
                // One that is of before has not been told; others may be gone.
                let copy = Process::open(thawed.pid).unwrap();
                let mem = File::options().write(true).open(format!("/proc/{}/mem", thawed.pid));
                let _ = mem.and_then(|mem| mem.write_all_at(&[1], machine.ram.unwrap() + FLAG));
                let ended = || copy.as_ref().is_none_or(|copy| copy.try_reap().is_some());
                until("the copy ends as its original did", ended);
            }
            Err(ControlError::Failed { sentence, .. }) => {
                assert_eq!(sentence, REFUSED);
                refused += 1;
            }
            // The end was noticed first.
            Err(ControlError::Closed) => gone += 1,
            other => panic!("{other:?}"),
        }
        machine.wait();
    }
    println!("{copied} copied, {refused} refused, {gone} gone");
    assert!(copied + refused > 0, "no freeze came before the end");
}
