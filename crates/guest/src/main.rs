//! `keiki-guest` is PID 1 of every sandbox. It boots the root disk's system, reaps processes, and
//! serves the node over one virtio-console port: it runs commands, moves files, freezes user work,
//! and gives a copy its identity after a thaw.
//!
//! One thread does nearly everything; calls that may block on a file system run on other threads.
//! The agent must never exit: the kernel would panic.

mod archive;
mod boot;
mod cgroup;
mod dial;
mod exec;
mod files;
mod identity;
mod link;
mod log;
mod port;
mod ports;
mod reaper;
mod ring;
mod service;
mod sys;
mod tcp_table;
mod users;
mod watch;

use keiki_sys::error_chain;
use std::{process::ExitCode, sync::Arc, time::Duration};

/// Threads for blocking calls: enough for several transfers and a file system that hangs.
const BLOCKING_THREADS: usize = 24;
/// An idle thread saves a command a millisecond.
const THREAD_KEEP: Duration = Duration::from_secs(3600);

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("keiki-guest runs only as the first process of a sandbox");
        return ExitCode::from(2);
    }
    if let Err(error) = boot::boot() {
        log::line(&format!("cannot start: {}", error_chain(&error)));
        return end();
    }
    if let Err(error) = cgroup::prepare() {
        log::line(&format!("cannot start: control groups: {error}"));
        return end();
    }
    if let Err(error) = identity::prepare() {
        log::line(&format!("machine ID: {error}"));
    }
    // A freeze must not wait for the time slices of user work, nor a command for those of its
    // child.
    if let Err(error) = sys::go_first() {
        log::line(&format!("priority: {error}"));
    }
    // A thawed copy has no time for page faults in the agent's code.
    if let Err(error) = rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT) {
        log::line(&format!("memory: {error}"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(THREAD_KEEP)
        // Without it a thread is only slower, and the first thread has logged the error.
        .on_thread_start(|| drop(sys::go_first()))
        .build();
    match runtime {
        Ok(runtime) => runtime.block_on(run()),
        Err(error) => log::line(&format!("cannot start: {error}")),
    }
    end()
}

/// A machine without its agent is useless, and a kernel panic would hide why.
fn end() -> ExitCode {
    service::power_off();
    ExitCode::FAILURE
}

async fn run() {
    let ended = match reaper::subscribe() {
        Ok(ended) => ended,
        Err(error) => return log::line(&format!("cannot start: child signals: {error}")),
    };
    let reaper = Arc::new(reaper::Reaper::default());
    let execs = exec::Execs::new(reaper.clone());
    let agent = service::Agent::new(execs.clone(), reaper.clone());
    tokio::spawn(reaper.run(ended, move || execs.sweep_groups()));
    let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    log::line(&format!("ready in {} ms", up.tv_sec * 1000 + up.tv_nsec / 1_000_000));
    link::serve(agent).await;
}
