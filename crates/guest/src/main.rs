//! `keiki-guest` is PID 1 of every sandbox. It boots the root disk's system, collects what ends, and does what
//! the node asks over one virtio-console port: run commands, move files, stand still for a freeze, and become
//! the new identity of a copy after a thaw.
//!
//! One thread does nearly everything; what may block on a file system has threads of its own. It must never
//! end: then the kernel panics, and the machine with it.

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

use std::{process::ExitCode, sync::Arc, time::Duration};

/// Threads for what blocks: enough for several transfers and a file system that hangs.
const BLOCKING_THREADS: usize = 24;
/// A thread that is there already saves a command a millisecond.
const THREAD_KEEP: Duration = Duration::from_secs(3600);

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("keiki-guest is the first process of a sandbox and runs as nothing else");
        return ExitCode::from(2);
    }
    if let Err(error) = boot::boot() {
        log::line(&format!("cannot start: {}", log::chain(&error)));
        return end();
    }
    if let Err(error) = cgroup::prepare() {
        log::line(&format!("cannot start: control groups: {error}"));
        return end();
    }
    if let Err(error) = identity::prepare() {
        log::line(&format!("machine id: {error}"));
    }
    // A freeze must not wait for user work's time slices, nor a command for its own child's.
    if let Err(error) = sys::go_first() {
        log::line(&format!("priority: {error}"));
    }
    // A page fault in the agent's own code is time that a thawed copy does not have.
    if let Err(error) = rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT) {
        log::line(&format!("memory: {error}"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(THREAD_KEEP)
        // Without it a thread is slower, not wrong, and the first thread has said so.
        .on_thread_start(|| drop(sys::go_first()))
        .build();
    match runtime {
        Ok(runtime) => runtime.block_on(run()),
        Err(error) => log::line(&format!("cannot start: {error}")),
    }
    end()
}

/// Without its agent a machine is of no use, and a kernel panic would hide why.
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
