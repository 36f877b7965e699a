//! System calls that no library wraps: the only `unsafe` code of the agent.
//!
//! Most of it is for [`spawn`]. A command must be in its control group before its first
//! instruction, or it could leave children outside. Moving it there after a fork takes a lock that
//! costs milliseconds of RCU time. `clone3` starts the child inside its group. The child shares the
//! agent's memory until it execs (as with `vfork`), so no page table is copied and the child can
//! report why it failed.
#![allow(unsafe_code)]

use rustix::{io::Errno, process::Pid};
use std::{
    arch::asm,
    ffi::{CString, c_char, c_int, c_long},
    fs::File,
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    sync::OnceLock,
};
use tokio::io::{Interest, unix::AsyncFd};

/// Everything a child needs, prepared before it exists: it must not allocate.
#[derive(Debug)]
pub struct Plan {
    /// Paths of the program, tried in this order, as in a search of PATH.
    pub paths: Vec<CString>,
    /// Arguments, the program's name first.
    pub argv: Vec<CString>,
    /// `NAME=value` each.
    pub env: Vec<CString>,
    /// Working directory.
    pub cwd: CString,
    /// Use `/` if `cwd` cannot be entered, instead of failing.
    pub cwd_optional: bool,
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Become descriptors 0, 1 and 2. All are greater than 2.
    pub stdio: [OwnedFd; 3],
    /// Descriptor 0 is a terminal and becomes the controlling one.
    pub terminal: bool,
}

/// The step at which a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Step {
    /// Session, descriptors, terminal.
    Prepare = 1,
    /// Groups and user.
    User,
    /// Working directory.
    Directory,
    /// Executing the program.
    Exec,
}

/// Why a command did not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No process was created.
    #[error("cannot create a process")]
    Clone(#[source] io::Error),
    /// The child failed before it executed the program.
    #[error("cannot start the program (step {step:?})")]
    Child {
        step: Step,
        #[source]
        error: io::Error,
    },
}

/// Shared between the agent and the child while the agent waits.
struct Context {
    paths: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    script: Vec<*const c_char>,
    env: Vec<*const c_char>,
    cwd: *const c_char,
    cwd_optional: bool,
    uid: u32,
    gid: u32,
    groups: *const u32,
    group_count: usize,
    stdio: [RawFd; 3],
    terminal: bool,
    step: i32,
    errno: i32,
}

const SHELL: &std::ffi::CStr = c"/bin/sh";
const STACK: usize = 64 << 10;

/// Starts `plan` inside the control group with directory `cgroup`. Returns once the child has
/// executed the program or failed, which may take as long as the file systems of the program and
/// its directory take.
pub fn spawn(plan: &Plan, cgroup: BorrowedFd<'_>) -> Result<Pid, SpawnError> {
    let list = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let mut script = vec![SHELL.as_ptr(), ptr::null()];
    script.extend(plan.argv.iter().skip(1).map(|s| s.as_ptr()));
    script.push(ptr::null());
    let mut context = Context {
        paths: list(&plan.paths),
        argv: list(&plan.argv),
        script,
        env: list(&plan.env),
        cwd: plan.cwd.as_ptr(),
        cwd_optional: plan.cwd_optional,
        uid: plan.uid,
        gid: plan.gid,
        groups: plan.groups.as_ptr(),
        group_count: plan.groups.len(),
        stdio: [&plan.stdio[0], &plan.stdio[1], &plan.stdio[2]].map(|fd| fd.as_raw_fd()),
        terminal: plan.terminal,
        step: 0,
        errno: 0,
    };
    let pid = clone_into(&mut context, cgroup).map_err(SpawnError::Clone)?;
    let step = match context.step {
        0 => return Ok(pid),
        1 => Step::Prepare,
        2 => Step::User,
        3 => Step::Directory,
        _ => Step::Exec,
    };
    // The reaper may be faster; either way the child is reaped.
    let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    Err(SpawnError::Child { step, error: io::Error::from_raw_os_error(context.errno) })
}

fn clone_into(context: &mut Context, cgroup: BorrowedFd<'_>) -> io::Result<Pid> {
    const CLEAR_SIGHAND: u64 = 0x1_0000_0000;
    const INTO_CGROUP: u64 = 0x2_0000_0000;
    let mut stack: Vec<u128> = Vec::with_capacity(STACK / 16);
    // SAFETY: clone_args is plain integers, for which all zeroes is a valid value.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64 | CLEAR_SIGHAND | INTO_CGROUP;
    args.exit_signal = libc::SIGCHLD as u64;
    args.stack = stack.as_mut_ptr() as u64;
    args.stack_size = STACK as u64;
    args.cgroup = cgroup.as_raw_fd() as u64;
    // No signal handler of the agent may run in the child while they share memory.
    let all = u64::MAX;
    let mut before = 0u64;
    let entry: extern "C" fn(*mut Context) -> ! = child;
    let result: isize;
    // SAFETY: rt_sigprocmask reads and writes the 8-byte sets given. clone3 reads `args`.
    // CLONE_VFORK stops this thread until the child has exec'd or exited, so `context`, what it
    // points into (`plan` of the caller) and `stack` outlive the child's use of them, and the
    // thread's errno is not used by two at once. The child runs on `stack`, whose end is 16-byte
    // aligned as the call requires, and never returns from `entry`; the parent continues at label 2
    // with its own registers. `syscall` clobbers rcx and r11.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const all, &raw mut before, 8usize);
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 as isize => result,
            in("rdi") &raw mut args,
            in("rsi") size_of::<libc::clone_args>(),
            in("r12") ptr::from_mut(context),
            in("r13") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const before, 0usize, 8usize);
    }
    drop(stack);
    match i32::try_from(result).ok().and_then(Pid::from_raw) {
        Some(pid) if result > 0 => Ok(pid),
        _ => Err(io::Error::from_raw_os_error(-result as i32)),
    }
}

/// The child, between clone and exec. Raw system calls only: the C library's wrappers for users and
/// groups would signal the agent's other threads, and nothing may allocate.
extern "C" fn child(context: *mut Context) -> ! {
    // SAFETY: `context` is valid and not used elsewhere: the agent's thread waits for this child.
    // All pointers in it are to NUL-terminated strings or NULL-terminated lists built by `spawn`.
    // Every call is a raw system call with arguments of the types the kernel expects.
    unsafe {
        let context = &mut *context;
        let call = |step: Step, result: c_long, context: &mut Context| {
            if result < 0 {
                context.errno = *libc::__errno_location();
                context.step = step as i32;
                libc::syscall(libc::SYS_exit_group, 127);
            }
        };
        // CLONE_CLEAR_SIGHAND has reset handlers, but signals that the agent ignores stay ignored.
        let default: [u64; 4] = [libc::SIG_DFL as u64, 0, 0, 0];
        libc::syscall(libc::SYS_rt_sigaction, libc::SIGPIPE, &raw const default, 0usize, 8usize);
        call(Step::Prepare, libc::syscall(libc::SYS_setsid), context);
        for (target, source) in context.stdio.into_iter().enumerate() {
            call(Step::Prepare, libc::syscall(libc::SYS_dup2, source, target), context);
        }
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        if context.terminal {
            call(Step::Prepare, libc::syscall(libc::SYS_ioctl, 0, libc::TIOCSCTTY, 0), context);
        }
        let groups = libc::syscall(libc::SYS_setgroups, context.group_count, context.groups);
        call(Step::User, groups, context);
        let gid = context.gid;
        call(Step::User, libc::syscall(libc::SYS_setresgid, gid, gid, gid), context);
        let uid = context.uid;
        call(Step::User, libc::syscall(libc::SYS_setresuid, uid, uid, uid), context);
        if libc::syscall(libc::SYS_chdir, context.cwd) < 0 {
            if !context.cwd_optional {
                call(Step::Directory, -1, context);
            }
            call(Step::Directory, libc::syscall(libc::SYS_chdir, c"/".as_ptr()), context);
        }
        let none = 0u64;
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, 0usize, 8usize);
        let mut error = libc::ENOENT;
        for at in 0..context.paths.len() - 1 {
            let path = context.paths[at];
            libc::syscall(libc::SYS_execve, path, context.argv.as_ptr(), context.env.as_ptr());
            match *libc::__errno_location() {
                libc::ENOENT | libc::ENOTDIR => {}
                // A script without an interpreter line, which a shell would run.
                libc::ENOEXEC => {
                    context.script[1] = path;
                    let script = context.script.as_ptr();
                    libc::syscall(libc::SYS_execve, SHELL.as_ptr(), script, context.env.as_ptr());
                    error = libc::ENOEXEC;
                    break;
                }
                libc::EACCES => error = libc::EACCES,
                other => {
                    error = other;
                    break;
                }
            }
        }
        *libc::__errno_location() = error;
        call(Step::Exec, -1, context);
        loop {
            libc::syscall(libc::SYS_exit_group, 127);
        }
    }
}

/// Adds bytes to the kernel's entropy pool and credits all their bits.
pub fn add_entropy(random: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
    let size = c_int::try_from(bytes.len()).map_err(|_| Errno::INVAL)?;
    let bits = size.checked_mul(8).ok_or(Errno::INVAL)?;
    let mut request = Vec::with_capacity(8 + bytes.len());
    request.extend_from_slice(&bits.to_ne_bytes());
    request.extend_from_slice(&size.to_ne_bytes());
    request.extend_from_slice(bytes);
    // SAFETY: RNDADDENTROPY reads two ints and then as many bytes as the second says: all in
    // `request`.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, request.as_ptr()) })
}

/// Reseeds the kernel's random number generator from its pool.
pub fn reseed(random: BorrowedFd<'_>) -> io::Result<()> {
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;
    // SAFETY: RNDRESEEDCRNG takes no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) })
}

/// Brings an interface up, with an address if one is given.
pub fn interface_up(socket: BorrowedFd<'_>, name: &str, address: Option<(Ipv4Addr, u8)>) -> io::Result<()> {
    let mut request = interface_request(name)?;
    if let Some((ip, prefix)) = address {
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        for (code, ip) in [(libc::SIOCSIFADDR, ip), (libc::SIOCSIFNETMASK, Ipv4Addr::from_bits(mask))] {
            request.ifr_ifru.ifru_addr = inet(ip);
            // SAFETY: the kernel reads an ifreq whose address is an IPv4 socket address.
            check(unsafe { libc::ioctl(socket.as_raw_fd(), code as libc::Ioctl, &raw const request) })?;
        }
    }
    // SAFETY: the kernel fills the flags of an ifreq; that member of the union is then the valid
    // one.
    unsafe {
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as libc::Ioctl, &raw mut request))?;
        request.ifr_ifru.ifru_flags |= (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as libc::Ioctl, &raw const request))
    }
}

/// Sets the default route.
pub fn default_route(socket: BorrowedFd<'_>, gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: rtentry is integers, socket addresses and a pointer that may be null: all zeroes is
    // valid.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = inet(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = inet(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = inet(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: the kernel reads an rtentry with IPv4 addresses and no device name.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT as libc::Ioctl, &raw const route) })
}

/// Forgets the link address of a neighbour on `device`.
pub fn forget_neighbour(socket: BorrowedFd<'_>, ip: Ipv4Addr, device: &str) -> io::Result<()> {
    // SAFETY: arpreq is socket addresses, an integer and a name: all zeroes is valid.
    let mut request: libc::arpreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.arp_dev.len() {
        return Err(Errno::NAMETOOLONG.into());
    }
    request.arp_pa = inet(ip);
    for (to, from) in request.arp_dev.iter_mut().zip(device.bytes()) {
        *to = from as c_char;
    }
    // SAFETY: the kernel reads an arpreq with an IPv4 address and a device name that ends.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCDARP as libc::Ioctl, &raw const request) })
}

fn interface_request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is a name and a union of integers, addresses and a nullable pointer: all zeroes
    // is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(Errno::NAMETOOLONG.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    Ok(request)
}

fn inet(ip: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0 as c_char; 14];
    for (to, from) in data[2..6].iter_mut().zip(ip.octets()) {
        *to = from as c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A file that is opened at its first use and stays open: opening it takes longer than using it.
pub fn kept_open(
    place: &'static OnceLock<File>,
    open: impl FnOnce() -> io::Result<File>,
) -> io::Result<&'static File> {
    match place.get() {
        Some(file) => Ok(file),
        None => {
            let file = open()?;
            Ok(place.get_or_init(|| file))
        }
    }
}

/// Duplicates a descriptor, with close-on-exec.
pub fn duplicate(fd: impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

/// Gives this thread priority over all user work. Its children have normal priority.
pub fn go_first() -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the kernel reads a sched_param; 0 means the calling thread.
    check(unsafe { libc::sched_setscheduler(0, policy, &raw const param) })
}

/// Registers a descriptor with the runtime.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays open, and the same descriptor, as long as the AsyncFd that owns it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
