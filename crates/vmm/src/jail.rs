//! The jail: what a monitor may do for the rest of its life, and all its copies after it.
//!
//! It is entered once, in the root of a lineage, before the first message: copies inherit it, and a filter for each
//! generation would be refused after some two hundred, and cost on every call.
//!
//! - Of the host's files: nothing. An empty root, read-only. What it works on arrives as descriptors.
//! - Namespaces of its own for mounts, network, IPC and host name. None for processes: killing the first of one would kill every
//!   descendant (DESIGN finding 2).
//! - A user that is nobody else's, no capability, no new privileges, not dumpable: relatives share the user, and may still
//!   not trace or read each other. Nor signal: the filter below has no call that could, except one signal that is ignored.

use keiki_control::Start;
use keiki_sys::jail::{Limits, enter_empty};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition as Condition,
    SeccompFilter, SeccompRule as Rule, TargetArch,
};
use std::{collections::BTreeMap, io};

/// Enters it. One thread, nothing begun.
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
    // A change of user resets it: after that.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    filter()
}

/// Installs the filter of system calls: all that is not listed ends the process.
pub fn filter() -> io::Result<()> {
    for program in [thread_creation().map_err(io::Error::other)?, allowed().map_err(io::Error::other)?] {
        seccompiler::apply_filter(&program).map_err(io::Error::other)?;
    }
    Ok(())
}

type Made<T> = Result<T, seccompiler::BackendError>;

/// `clone3` has its flags in memory, where no filter sees them: it does not exist, and the C library takes `clone`.
fn thread_creation() -> Made<BpfProgram> {
    let rules = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, missing, TargetArch::x86_64)?.try_into()
}

fn allowed() -> Made<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<Rule>> = CALLS.iter().map(|(call, _)| (*call, vec![])).collect();
    rules.insert(libc::SYS_ioctl, requests()?);
    // Copies of descriptors, and their flags. Not who gets a signal when one is ready: any relative could be made to.
    let orders = FCNTL.map(|order| equals(1, order.unsigned_abs().into()));
    rules.insert(libc::SYS_fcntl, orders.into_iter().collect::<Made<_>>()?);
    rules.insert(libc::SYS_clone, vec![flags_without(0, NAMESPACES | PARENT)?]);
    // The kick of a vCPU thread, which does nothing to whoever gets it.
    rules.insert(libc::SYS_tgkill, vec![equals(2, libc::SIGRTMIN().unsigned_abs().into())?]);
    // Its own alone: that of relatives, who are of the same user, could be taken from them.
    let own = [Condition::new(0, Len::Dword, Op::Eq, 0)?, Condition::new(1, Len::Dword, Op::Eq, 0)?];
    rules.insert(libc::SYS_setpriority, vec![Rule::new(own.to_vec())?]);
    let calls = [libc::PR_SET_NAME, libc::PR_SET_VMA].map(|option| equals(0, option.unsigned_abs().into()));
    rules.insert(libc::SYS_prctl, calls.into_iter().collect::<Made<_>>()?);
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, TargetArch::x86_64)?
        .try_into()
}

/// Flags of `clone` that make namespaces.
const NAMESPACES: u64 = 0x7e02_0000;
/// And the one that makes the child its parent's sibling: the node's child, which waits for none.
const PARENT: u64 = 0x8000;

/// What may be ordered with `fcntl`.
const FCNTL: [libc::c_int; 6] =
    [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_SETFL];

/// System calls, and what for.
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
    (libc::SYS_close_range, "a copy closes what is its parent's"),
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
    (libc::SYS_clone3, "a thread begins: the other filter says that there is no such call"),
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
    (libc::SYS_restart_syscall, "a wait goes on after it was stopped"),
    (libc::SYS_exit, "a thread ends"),
    (libc::SYS_exit_group, "the process ends"),
];

/// What may be asked of a descriptor.
fn requests() -> Made<Vec<Rule>> {
    /// All of KVM's have this type.
    const KVM: u64 = 0xae00;
    const TYPE: u64 = 0xff00;
    /// `PAGEMAP_SCAN`: the pages that are private.
    const PAGEMAP_SCAN: u64 = 0xc060_6610;
    /// `TUNSETOFFLOAD`, `TUNSETVNETHDRSZ`. Not `TUNSETIFF`: a tap arrives attached.
    const TAP: [u64; 2] = [0x4004_54d0, 0x4004_54d8];
    /// `FIONBIO`, `FIONREAD`, `FIOCLEX`: how the standard library sets and asks things.
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
