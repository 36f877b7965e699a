//! Reaps all processes: every process becomes a child of PID 1 sooner or later.
//!
//! A command may exit before its pid is registered. So while a start is under way, the statuses of
//! unknown processes are kept.

use parking_lot::Mutex;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};
use std::{collections::HashMap, sync::Arc};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

/// Reaps processes and passes their statuses on.
#[derive(Debug, Default)]
pub struct Reaper {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: HashMap<Pid, oneshot::Sender<WaitStatus>>,
    starting: usize,
    early: HashMap<Pid, WaitStatus>,
}

/// A start under way. [`Start::started`] ends it, and so does dropping it.
#[derive(Debug)]
pub struct Start<'a>(&'a Reaper);

impl Reaper {
    /// Call this before a process is started.
    pub fn start(&self) -> Start<'_> {
        self.inner.lock().starting += 1;
        Start(self)
    }

    /// Reaps for ever. Calls `orphan` after it has reaped an unknown process.
    pub async fn run(self: Arc<Self>, mut ended: Signal, orphan: impl Fn()) {
        loop {
            if self.sweep() {
                orphan();
            }
            if ended.recv().await.is_none() {
                return;
            }
        }
    }

    fn sweep(&self) -> bool {
        let mut orphans = false;
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            orphans |= !self.inner.lock().dispatch(pid, status);
        }
        orphans
    }
}

/// Subscribes to SIGCHLD. Call this before the first child exists.
pub fn subscribe() -> std::io::Result<Signal> {
    signal(SignalKind::child())
}

impl Inner {
    fn dispatch(&mut self, pid: Pid, status: WaitStatus) -> bool {
        if let Some(waiting) = self.waiting.remove(&pid) {
            // It is fine if the session no longer waits.
            let _ = waiting.send(status);
            return true;
        }
        if self.starting > 0 {
            self.early.insert(pid, status);
        }
        false
    }
}

impl Start<'_> {
    /// The process has this pid. Its status is sent once.
    pub fn started(self, pid: Pid) -> oneshot::Receiver<WaitStatus> {
        let (sender, receiver) = oneshot::channel();
        let mut inner = self.0.inner.lock();
        match inner.early.remove(&pid) {
            Some(status) => drop(sender.send(status)),
            None => drop(inner.waiting.insert(pid, sender)),
        }
        receiver
    }
}

impl Drop for Start<'_> {
    fn drop(&mut self) {
        let mut inner = self.0.inner.lock();
        inner.starting -= 1;
        if inner.starting == 0 {
            inner.early = HashMap::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Reaper;
    use std::process::Command;

    /// One test, because `wait` reaps any child of this process.
    #[test]
    fn statuses_arrive_whether_the_end_or_the_registration_comes_first() {
        let reaper = Reaper::default();
        let run = |code: u32| Command::new("/bin/sh").args(["-c", &format!("exit {code}")]).spawn().unwrap();
        let until = |done: &mut dyn FnMut() -> bool| {
            for _ in 0..500 {
                reaper.sweep();
                if done() {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            panic!("no status came");
        };

        let start = reaper.start();
        let pid = rustix::process::Pid::from_child(&run(7));
        until(&mut || reaper.inner.lock().early.contains_key(&pid));
        let mut early = start.started(pid);
        assert_eq!(early.try_recv().unwrap().exit_status(), Some(7));

        let start = reaper.start();
        let mut late = start.started(rustix::process::Pid::from_child(&run(9)));
        let mut code = None;
        until(&mut || {
            code = late.try_recv().ok().and_then(|status| status.exit_status());
            code.is_some()
        });
        assert_eq!(code, Some(9));

        let orphan = rustix::process::Pid::from_child(&run(3));
        until(&mut || rustix::process::test_kill_process(orphan).is_err());
        assert!(reaper.inner.lock().early.is_empty() && reaper.inner.lock().waiting.is_empty());
    }
}
