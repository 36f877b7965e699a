//! The jail of a monitor and of all its copies, for the rest of their lives.
//!
//! The root of a lineage enters it once, before the first message, and copies inherit it. Another
//! filter for each generation would slow every call, and the kernel refuses it after some two
//! hundred.
//!
//! - An empty read-only root: it has no file of the host. Descriptors arrive with requests.
//! - Its own namespaces for mounts, network, IPC and host name. No pid namespace: killing its first
//!   process would kill every descendant.
//! - A user that no other lineage has, no capability, no new privileges, not dumpable. Relatives
//!   share the user, but cannot trace or read each other. The filter has no call that sends
//!   signals, except one signal that is ignored.

use keiki_control::Start;
use keiki_sys::jail::{Limits, enter_empty};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition as Condition,
    SeccompFilter, SeccompRule as Rule, TargetArch,
};
use std::{collections::BTreeMap, io};

/// Enters the jail. The process must have one thread and no work under way.
///
/// # Errors
/// After an error the process must end.
pub fn enter(user: u32, start: &Start) -> io::Result<()> {
    let limits = Limits {
        files: start.files,
        tasks: start.tasks,
        file_bytes: start.file_bytes,
        oom_score_adj: start.oom_score_adj,
    };
    enter_empty(user, limits)?;
    // After the change of user, which resets it.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    filter()
}

/// Installs the system call filter. A call that is not listed ends the process.
pub fn filter() -> io::Result<()> {
    for program in [thread_creation().map_err(io::Error::other)?, allowed().map_err(io::Error::other)?] {
        seccompiler::apply_filter(&program).map_err(io::Error::other)?;
    }
    Ok(())
}

type Made<T> = Result<T, seccompiler::BackendError>;

/// `clone3` has its flags in memory, where a filter cannot see them. It fails as if the kernel did
/// not have it, and the C library uses `clone`.
fn thread_creation() -> Made<BpfProgram> {
    let rules = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, missing, TargetArch::x86_64)?.try_into()
}

fn allowed() -> Made<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<Rule>> = CALLS.iter().map(|(call, _)| (*call, vec![])).collect();
    rules.insert(libc::SYS_ioctl, requests()?);
    // Duplicates descriptors and changes flags. Does not choose the receiver of signals, which
    // could be any relative.
    let orders = FCNTL.map(|order| equals(1, order.unsigned_abs().into()));
    rules.insert(libc::SYS_fcntl, orders.into_iter().collect::<Made<_>>()?);
    rules.insert(libc::SYS_clone, vec![flags_without(0, NAMESPACES | PARENT)?]);
    // The kick of a vCPU thread, which does nothing else to its receiver.
    rules.insert(libc::SYS_tgkill, vec![equals(2, libc::SIGRTMIN().unsigned_abs().into())?]);
    // Its own priority only: relatives have the same user.
    let own = [Condition::new(0, Len::Dword, Op::Eq, 0)?, Condition::new(1, Len::Dword, Op::Eq, 0)?];
    rules.insert(libc::SYS_setpriority, vec![Rule::new(own.to_vec())?]);
    let calls = [libc::PR_SET_NAME, libc::PR_SET_VMA].map(|option| equals(0, option.unsigned_abs().into()));
    rules.insert(libc::SYS_prctl, calls.into_iter().collect::<Made<_>>()?);
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, TargetArch::x86_64)?
        .try_into()
}

/// Flags of `clone` that create namespaces.
const NAMESPACES: u64 = 0x7e02_0000;
/// The flag that makes the child a sibling of its parent. It would be a child of the node, which
/// does not expect it.
const PARENT: u64 = 0x8000;

/// Allowed operations of `fcntl`.
const FCNTL: [libc::c_int; 6] =
    [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_SETFL];

/// Allowed system calls, and their purpose.
const CALLS: &[(i64, &str)] = &[
    (libc::SYS_read, "events, memory and state files"),
    (libc::SYS_write, "events, files, the tap, messages on standard error"),
    (libc::SYS_readv, "the tap"),
    (libc::SYS_writev, "the tap, the agent connection"),
    (libc::SYS_pread64, "disk layers"),
    (libc::SYS_pwrite64, "disk layers, memory and state files"),
    (libc::SYS_preadv, "disk layers"),
    (libc::SYS_pwritev, "disk layers"),
    (libc::SYS_preadv2, "disk layers"),
    (libc::SYS_pwritev2, "disk layers"),
    (libc::SYS_lseek, "sizes and holes of files, the end of the console log"),
    (libc::SYS_ftruncate, "memory and state files, disk layers, the console log"),
    (libc::SYS_fallocate, "holes in memory files and disk layers"),
    (libc::SYS_fsync, "flush of a disk"),
    (libc::SYS_fdatasync, "flush of a disk"),
    (libc::SYS_fstat, "sizes of files"),
    (libc::SYS_newfstatat, "sizes of files: how the C library asks for them"),
    (libc::SYS_statx, "sizes of files: how the standard library asks for them"),
    (libc::SYS_fstatfs, "block sizes of disk layers"),
    (libc::SYS_close, "descriptors"),
    (libc::SYS_close_range, "a copy closes its parent's descriptors"),
    (libc::SYS_dup, "copies of descriptors"),
    (libc::SYS_dup2, "a copy's own standard error"),
    (libc::SYS_eventfd2, "events of devices"),
    (libc::SYS_timerfd_create, "the rate limit of the entropy device"),
    (libc::SYS_timerfd_settime, "the rate limit of the entropy device"),
    (libc::SYS_epoll_create1, "events of a device"),
    (libc::SYS_epoll_ctl, "events of a device"),
    (libc::SYS_epoll_wait, "events of a device"),
    (libc::SYS_epoll_pwait, "events of a device"),
    (libc::SYS_poll, "the event loop"),
    (libc::SYS_ppoll, "the event loop"),
    (libc::SYS_accept4, "connections to the control and agent sockets"),
    (libc::SYS_recvmsg, "requests with descriptors"),
    (libc::SYS_recvfrom, "the agent connection"),
    (libc::SYS_sendmsg, "replies"),
    (libc::SYS_sendto, "the agent connection"),
    (libc::SYS_shutdown, "the agent connection"),
    (libc::SYS_setsockopt, "time limits of the control socket"),
    (libc::SYS_getsockopt, "state of a socket"),
    (libc::SYS_mmap, "guest memory, stacks, allocations"),
    (libc::SYS_munmap, "the same"),
    (libc::SYS_mremap, "allocations that grow"),
    (libc::SYS_mprotect, "guards of stacks"),
    (libc::SYS_madvise, "guest memory, stacks"),
    (libc::SYS_brk, "allocations"),
    (libc::SYS_futex, "locks"),
    (libc::SYS_clone3, "a thread begins: the other filter answers that the call does not exist"),
    (libc::SYS_set_robust_list, "a thread or a copy begins"),
    (libc::SYS_rseq, "a thread or a copy begins"),
    (libc::SYS_sigaltstack, "a thread begins or ends"),
    (libc::SYS_rt_sigprocmask, "a thread begins, or a copy"),
    (libc::SYS_rt_sigaction, "the handler of the kick"),
    (libc::SYS_rt_sigreturn, "the handler of the kick returns"),
    (libc::SYS_sched_getaffinity, "a thread begins"),
    (libc::SYS_sched_yield, "locks"),
    (libc::SYS_gettid, "a thread's own number"),
    (libc::SYS_getpid, "a process's own number"),
    (libc::SYS_getrandom, "entropy for the guest, hash keys, the page map's check"),
    (libc::SYS_clock_gettime, "time limits, where the kernel has no faster way"),
    (libc::SYS_clock_nanosleep, "waiting for threads to end"),
    (libc::SYS_nanosleep, "the same"),
    (libc::SYS_restart_syscall, "a wait continues after a stop"),
    (libc::SYS_exit, "a thread ends"),
    (libc::SYS_exit_group, "the process ends"),
];

/// Allowed `ioctl` requests.
fn requests() -> Made<Vec<Rule>> {
    /// All requests of KVM have this type.
    const KVM: u64 = 0xae00;
    const TYPE: u64 = 0xff00;
    /// `PAGEMAP_SCAN`: the pages that are private.
    const PAGEMAP_SCAN: u64 = 0xc060_6610;
    /// `TUNSETOFFLOAD`, `TUNSETVNETHDRSZ`. Not `TUNSETIFF`: a tap arrives attached.
    const TAP: [u64; 2] = [0x4004_54d0, 0x4004_54d8];
    /// `FIONBIO`, `FIONREAD`, `FIOCLEX`, which the standard library uses.
    const PLAIN: [u64; 3] = [0x5421, 0x541b, 0x5451];
    let kvm = Rule::new(vec![Condition::new(1, Len::Dword, Op::MaskedEq(TYPE), KVM)?])?;
    let single = [PAGEMAP_SCAN].into_iter().chain(TAP).chain(PLAIN).map(|request| equals(1, request));
    std::iter::once(Ok(kvm)).chain(single).collect()
}

fn equals(argument: u8, value: u64) -> Made<Rule> {
    Rule::new(vec![Condition::new(argument, Len::Dword, Op::Eq, value)?])
}

fn flags_without(argument: u8, flags: u64) -> Made<Rule> {
    Rule::new(vec![Condition::new(argument, Len::Qword, Op::MaskedEq(flags), 0)?])
}
