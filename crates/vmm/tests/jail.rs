//! What a monitor cannot do, and what other processes cannot do to it.

mod monitor;

use keiki_control::Start;
use keiki_hv::fork::{Side, exit, fork};
use keiki_testing::is_root;
use monitor::{Monitor, SILENT, TestHost, USER, host};
use rustix::process::{Pid, WaitOptions, waitpid};
use std::{fs, io::Read, path::PathBuf, process::Command};

/// Does `what` in its own process. Returns how that ended.
fn in_process(what: impl FnOnce() -> i32) -> (Option<i32>, Option<i32>) {
    match fork(&[]).unwrap() {
        Side::Child => exit(what()),
        Side::Parent { child } => {
            let pid = Pid::from_raw(child as i32);
            let (_, status) = waitpid(pid, WaitOptions::empty()).unwrap().unwrap();
            (status.exit_status(), status.terminating_signal())
        }
    }
}

/// A machine, its zygote and a copy, in their jails.
struct Family {
    host: TestHost,
    machine: Monitor,
    zygote: Monitor,
    copy: Monitor,
}

/// None where no monitor can run or be jailed.
fn family() -> Option<Family> {
    let host = host()?;
    if !is_root() {
        return None;
    }
    let mut machine = host.boot(SILENT);
    let (mut zygote, _) = host.freeze(&mut machine);
    let copy = host.thaw(&mut zygote);
    Some(Family { host, machine, zygote, copy })
}

#[test]
fn a_machine_and_its_copies_have_nothing() {
    let Some(Family { machine, zygote, copy, host: _place }) = family() else { return };
    for monitor in [&machine, &zygote, &copy] {
        looks_jailed(monitor);
    }
}

fn looks_jailed(monitor: &Monitor) {
    use std::os::unix::fs::MetadataExt;
    let proc = PathBuf::from(format!("/proc/{}", monitor.pid()));
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert_eq!(field("Uid:"), vec![USER.to_string(); 4]);
    assert_eq!(field("Gid:"), vec![USER.to_string(); 4]);
    assert_eq!(field("Groups:"), [""; 0]);
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), (vec!["1".into()], vec!["2".into()]));
    // Not dumpable: its files in /proc belong to root.
    assert_eq!(fs::metadata(proc.join("mem")).unwrap().uid(), 0);
    // An empty root, and nothing can be made in it.
    assert_eq!(fs::read_dir(proc.join("root")).unwrap().count(), 0);
    let mounts = fs::read_to_string(proc.join("mounts")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    assert!(mounts.contains("tmpfs ro,"), "{mounts}");
    for (name, own) in [("mnt", true), ("net", true), ("ipc", true), ("uts", true), ("pid", false)] {
        let link = |proc: PathBuf| fs::read_link(proc.join("ns").join(name)).unwrap();
        assert_eq!(link(proc.clone()) != link("/proc/self".into()), own, "{name}");
    }
    let limits = fs::read_to_string(proc.join("limits")).unwrap();
    let limits = limits.split_whitespace().collect::<Vec<_>>().join(" ");
    for limit in [
        "Max core file size 0 0",
        "Max open files 256 256",
        "Max processes 4096 4096",
        "Max file size 68719476736 68719476736",
    ] {
        assert!(limits.contains(limit), "{limits}");
    }
}

/// The filter must allow the requests that set up a tap.
#[test]
fn a_jailed_machine_takes_its_tap() {
    use keiki_sys::{netns, tap};
    use std::panic::AssertUnwindSafe;
    let Some(mut host) = host() else { return };
    if !is_root() {
        return;
    }
    let name = format!("keiki-vmm-test-{}", std::process::id());
    let taps = netns::on_own_thread(|| {
        netns::create(&name)?;
        Ok((tap::open_offloading("tap0")?, tap::open_offloading("tap1")?))
    });
    let done = std::panic::catch_unwind(AssertUnwindSafe(move || {
        let (first, second) = taps.unwrap();
        host.tap = Some(first);
        let mut machine = host.boot(SILENT);
        machine.counts();
        let (mut zygote, _) = host.freeze(&mut machine);
        host.tap = Some(second);
        host.thaw(&mut zygote).counts();
        machine.counts();
    }));
    netns::remove(&name).unwrap();
    done.unwrap();
}

/// A process of the same user, without the filter: it may not read or trace.
#[test]
fn a_relative_cannot_look_into_it() {
    let Some(host) = host() else { return };
    if !is_root() {
        return;
    }
    let machine = host.boot(SILENT);
    let pid = machine.pid();
    let address = machine.ram_start();
    let (code, _) = in_process(|| {
        become_user(USER);
        let opened = ["mem", "pagemap", "maps", "fd", "environ"]
            .iter()
            .filter(|file| {
                let path = format!("/proc/{pid}/{file}");
                fs::File::open(&path).is_ok_and(|mut file| file.read(&mut [0; 8]).is_ok())
                    || fs::read_dir(path).is_ok()
            })
            .count();
        let read = keiki_sys::pages::read_memory(pid, address, &mut [0; 8]).is_ok();
        opened as i32 + i32::from(read) * 100
    });
    assert_eq!(code, Some(0), "something of it can be read");
}

/// Becomes this user, in its own process.
fn become_user(user: u32) {
    let (id, group) = (rustix::process::Uid::from_raw(user), rustix::process::Gid::from_raw(user));
    rustix::thread::set_thread_res_gid(group, group, group).unwrap();
    rustix::thread::set_thread_res_uid(id, id, id).unwrap();
}

/// A hostile process beside a machine, its zygote and a copy. A relative has the same user but also
/// the filter, and ends at the first attempt. A monitor of another lineage has another user, and
/// the kernel refuses it even without a filter.
#[test]
#[allow(unsafe_code)]
fn a_bystander_can_neither_end_nor_trace_nor_read_them() {
    let Some(Family { host, mut machine, mut zygote, copy }) = family() else { return };
    let address = machine.ram_start() as i64;
    for pid in [machine.pid(), zygote.pid(), copy.pid()].map(i64::from) {
        let (mut buffer, kill) = ([0_u8; 8], libc::SIGKILL as i64);
        let own = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: 8 };
        let theirs = libc::iovec { iov_base: address as *mut _, iov_len: 8 };
        let (own, theirs) = (&raw const own as i64, &raw const theirs as i64);
        // The data of a queued signal: sent by a user.
        let info = [0_u64; 16];
        let info = info.as_ptr() as i64;
        let attempts: [(&str, i64, [i64; 6]); 8] = [
            ("kill", libc::SYS_kill, [pid, kill, 0, 0, 0, 0]),
            ("stop", libc::SYS_kill, [pid, libc::SIGSTOP as i64, 0, 0, 0, 0]),
            ("tgkill", libc::SYS_tgkill, [pid, pid, kill, 0, 0, 0]),
            ("queue a signal", libc::SYS_rt_sigqueueinfo, [pid, kill, info, 0, 0, 0]),
            ("attach", libc::SYS_ptrace, [libc::PTRACE_ATTACH as i64, pid, 0, 0, 0, 0]),
            ("seize", libc::SYS_ptrace, [libc::PTRACE_SEIZE as i64, pid, 0, 0, 0, 0]),
            ("read", libc::SYS_process_vm_readv, [pid, own, 1, theirs, 1, 0]),
            ("write", libc::SYS_process_vm_writev, [pid, own, 1, theirs, 1, 0]),
        ];
        for (name, call, [a, b, c, d, e, f]) in attempts {
            let relative = in_process(|| {
                become_user(USER);
                rustix::thread::set_no_new_privs(true).unwrap();
                keiki_vmm::jail::filter().unwrap();
                // SAFETY: the process ends here, either way; the structures outlive the call.
                unsafe { libc::syscall(call, a, b, c, d, e, f) };
                3
            });
            assert_eq!(relative, (None, Some(libc::SIGSYS)), "{name}");
            let stranger = in_process(|| {
                become_user(USER + 1);
                // SAFETY: as above.
                let done = unsafe { libc::syscall(call, a, b, c, d, e, f) };
                if done < 0 { std::io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 }
            });
            assert_eq!(stranger, (Some(libc::EPERM), None), "{name}");
        }
    }
    // The one signal that a relative may send does nothing to its receiver, however often it comes.
    for pid in [machine.pid(), zygote.pid(), copy.pid()] {
        let threads =
            fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|entry| entry.unwrap().file_name());
        let threads: Vec<i64> = threads.map(|name| name.to_str().unwrap().parse().unwrap()).collect();
        let sent = in_process(|| {
            become_user(USER);
            rustix::thread::set_no_new_privs(true).unwrap();
            keiki_vmm::jail::filter().unwrap();
            for thread in threads.iter().cycle().take(3000) {
                // SAFETY: the call takes numbers only.
                let done = unsafe {
                    libc::syscall(libc::SYS_tgkill, i64::from(pid), *thread, libc::SIGRTMIN() as i64)
                };
                if done != 0 {
                    return 1;
                }
            }
            0
        });
        assert_eq!(sent, (Some(0), None), "the kick of {pid}");
    }
    assert!(machine.lives() && zygote.lives() && copy.lives());
    machine.counts();
    copy.counts();
    host.thaw(&mut zygote).counts();
    host.thaw(&mut host.freeze(&mut machine).0).counts();
}

/// A process may lower its own priority, so that writing does not slow machines.
#[test]
fn a_process_may_step_back() {
    let stepped = in_process(|| {
        rustix::thread::set_no_new_privs(true).unwrap();
        keiki_vmm::jail::filter().unwrap();
        i32::from(rustix::process::setpriority_process(None, 10).is_err())
    });
    assert_eq!(stepped, (Some(0), None));
}

/// The purpose of the filter: each of these calls ends the process.
#[test]
#[allow(unsafe_code)]
fn forbidden_calls_end_the_process() {
    let me = std::process::id() as i64;
    #[rustfmt::skip]
    let forbidden: &[(&str, i64, [i64; 3])] = &[
        ("kill", libc::SYS_kill, [me, 0, 0]),
        ("tkill", libc::SYS_tkill, [me, 0, 0]),
        ("tgkill with another signal", libc::SYS_tgkill, [me, me, libc::SIGKILL as i64]),
        ("pidfd_open", libc::SYS_pidfd_open, [me, 0, 0]),
        ("pidfd_send_signal", libc::SYS_pidfd_send_signal, [0, 0, 0]),
        ("ptrace", libc::SYS_ptrace, [libc::PTRACE_ATTACH as i64, me, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [me, 0, 0]),
        ("open", libc::SYS_open, [c"/".as_ptr() as i64, 0, 0]),
        ("openat", libc::SYS_openat, [libc::AT_FDCWD as i64, c"/".as_ptr() as i64, 0]),
        ("socket", libc::SYS_socket, [libc::AF_INET as i64, libc::SOCK_STREAM as i64, 0]),
        ("connect", libc::SYS_connect, [0, 0, 0]),
        ("execve", libc::SYS_execve, [c"/bin/true".as_ptr() as i64, 0, 0]),
        ("unshare", libc::SYS_unshare, [libc::CLONE_NEWUSER as i64, 0, 0]),
        ("clone with a namespace", libc::SYS_clone, [libc::CLONE_NEWUSER as i64 | libc::SIGCHLD as i64, 0, 0]),
        ("mount", libc::SYS_mount, [0, 0, 0]),
        ("bpf", libc::SYS_bpf, [0, 0, 0]),
        ("userfaultfd", libc::SYS_userfaultfd, [0, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [1, 0, 0]),
        ("ioctl of a terminal", libc::SYS_ioctl, [0, libc::TIOCSTI as i64, 0]),
        ("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as i64, 1, 0]),
        ("seccomp", libc::SYS_seccomp, [0, 0, 0]),
        ("setuid", libc::SYS_setuid, [0, 0, 0]),
        ("setpriority of another", libc::SYS_setpriority, [libc::PRIO_PROCESS as i64, me, 19]),
        ("setpriority of a group", libc::SYS_setpriority, [libc::PRIO_PGRP as i64, 0, 19]),
        ("setpriority of a user", libc::SYS_setpriority, [libc::PRIO_USER as i64, 0, 19]),
    ];
    for (name, call, [a, b, c]) in forbidden {
        let (code, signal) = in_process(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            keiki_vmm::jail::filter().unwrap();
            // SAFETY: the process ends here, either way.
            unsafe { libc::syscall(*call, *a, *b, *c, 0, 0, 0) };
            3
        });
        assert_eq!((code, signal), (None, Some(libc::SIGSYS)), "{name}");
    }
    // A thread can still be created.
    let (code, _) = in_process(|| {
        rustix::thread::set_no_new_privs(true).unwrap();
        keiki_vmm::jail::filter().unwrap();
        i32::from(std::thread::spawn(|| 5).join().unwrap_or(0) != 5)
    });
    assert_eq!(code, Some(0));
}

#[test]
fn it_is_started_by_a_node_only() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_keiki-vmm")).args(args).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = run(&["--help"]);
    assert_eq!(code, Some(keiki_vmm::EXIT_START));
    assert!(text.contains("started by a keiki node, not by hand"), "{text}");
    let start = Start {
        control: 77,
        user: None,
        files: 64,
        tasks: 64,
        file_bytes: 1 << 20,
        oom_score_adj: 0,
        mark: "x".into(),
    };
    let args: Vec<_> = start.to_args().into_iter().map(|arg| arg.into_string().unwrap()).collect();
    let (code, text) = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(code, Some(keiki_vmm::EXIT_START));
    assert!(text.contains("the control descriptor"), "{text}");
}
