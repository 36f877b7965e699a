//! A monitor process as every engine sees it: watched by descriptor, killed by descriptor.
//!
//! Monitors outlive the daemon, so nothing here ends one by being dropped. Standard error is a pipe
//! that we drain into a small buffer: a monitor that writes endlessly cannot fill a disk, and once
//! the daemon is gone its output is discarded.

use crate::{EngineError, Result};
use keiki_sys::process::Process;
use parking_lot::Mutex;
use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, Interest, unix::AsyncFd},
    sync::watch,
    task::{JoinError, JoinHandle},
    time::{sleep, timeout},
};

/// How long a killed monitor may take to be gone: it unmaps its RAM.
const KILL: Duration = Duration::from_secs(10);
/// What is kept of a monitor's standard error.
const STDERR_KEPT: usize = 4096;
/// QEMU writes these at every start or load.
const HARMLESS: [&str; 2] = ["Expected vmdescription", "is not connected to host network"];

/// A task that ends with its owner.
pub(crate) struct Task(pub(crate) JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A process and how it ended.
pub(crate) struct Watched {
    pub(crate) process: Arc<Process>,
    stderr: Arc<Mutex<Vec<u8>>>,
    /// How the process ended.
    ended: watch::Receiver<Option<String>>,
    _drain: Option<Task>,
}

impl Watched {
    /// Watches a process, and drains its standard error if we have it. `at_end` is called once it
    /// is gone, also if this was dropped before; never if we end first.
    pub(crate) fn new(
        process: Arc<Process>,
        pipe: Option<OwnedFd>,
        at_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let failed = |source| EngineError::Io { what: "cannot watch the monitor".into(), source };
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let drain = match pipe {
            Some(pipe) => {
                let pipe = tokio::net::unix::pipe::Receiver::from_owned_fd(pipe).map_err(failed)?;
                Some(Task(tokio::spawn(drain(pipe, Arc::clone(&stderr)))))
            }
            None => None,
        };
        let (set_ended, ended) = watch::channel(None);
        // The safe constructor: its worry, a descriptor that changes while watched, cannot come
        // from `Process`.
        #[expect(deprecated)]
        let watched = AsyncFd::with_interest(Arc::clone(&process), Interest::READABLE).map_err(failed)?;
        // Not aborted with us: the process must be reaped also after this was dropped.
        tokio::spawn(reap(watched, set_ended, at_end));
        Ok(Self { process, stderr, ended, _drain: drain })
    }

    /// The last line that it wrote to standard error.
    pub(crate) fn stderr_line(&self) -> Option<String> {
        let bytes = self.stderr.lock();
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = text.lines().filter(|line| !line.trim().is_empty());
        lines
            .rfind(|line| !HARMLESS.iter().any(|known| line.contains(known)))
            .map(|line| line.chars().take(400).collect())
    }

    /// How it ended, if it has.
    pub(crate) fn has_ended(&self) -> Option<String> {
        let how = self.ended.borrow().clone()?;
        Some(match self.stderr_line() {
            Some(line) => format!("{how}: {line}"),
            None => how,
        })
    }

    /// Resolves when it has ended.
    pub(crate) async fn wait(&self) {
        let mut ended = self.ended.clone();
        // An error means that the runtime shuts down: nothing more will be known.
        let _ = ended.wait_for(Option::is_some).await;
    }

    /// Kills it and waits until it is gone.
    pub(crate) async fn kill(&self) -> Result<()> {
        self.process.kill().map_err(cannot_kill)?;
        timeout(KILL, self.wait()).await.map_err(|_| does_not_die())
    }
}

async fn drain(mut pipe: tokio::net::unix::pipe::Receiver, kept: Arc<Mutex<Vec<u8>>>) {
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
        let mut kept = kept.lock();
        kept.extend(buffer.iter().take(count));
        let excess = kept.len().saturating_sub(STDERR_KEPT);
        kept.drain(..excess);
    }
}

async fn reap(
    watched: AsyncFd<Arc<Process>>,
    set_ended: watch::Sender<Option<String>>,
    at_end: impl FnOnce() + Send,
) {
    loop {
        let ready = watched.readable().await;
        if let Some(how) = watched.get_ref().try_reap() {
            at_end();
            set_ended.send_replace(Some(how));
            return;
        }
        match ready {
            Ok(mut guard) => guard.clear_ready(),
            Err(_) => return,
        }
    }
}

/// Runs blocking work outside the async threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(task_failed)?
}

/// Runs to its end what must not be left half done, even if the caller disconnects.
pub(crate) async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(work).await.map_err(task_failed)?
}

fn task_failed(error: JoinError) -> EngineError {
    EngineError::Monitor(format!("task failed: {error}"))
}

/// Kills an unwatched process, and waits until it is gone.
pub(crate) async fn end(process: &Process) -> Result<()> {
    process.kill().map_err(cannot_kill)?;
    let gone = async {
        while process.try_reap().is_none() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(KILL, gone).await.map_err(|_| does_not_die())
}

fn cannot_kill(source: io::Error) -> EngineError {
    EngineError::Io { what: "cannot kill the monitor".into(), source }
}

fn does_not_die() -> EngineError {
    EngineError::Monitor("does not exit after SIGKILL".into())
}

#[cfg(test)]
mod tests {
    use super::Watched;
    use keiki_sys::process::{Process, Setup};
    use std::{process::Command, sync::Arc};

    #[tokio::test]
    async fn the_end_is_noticed_after_a_drop() -> Result<(), Box<dyn std::error::Error>> {
        let (process, _) = Process::spawn(Command::new("sleep").arg("7777"), Setup::default())?;
        let (process, (tell, ended)) = (Arc::new(process), tokio::sync::oneshot::channel());
        let of = Arc::clone(&process);
        let watched = Watched::new(Arc::clone(&process), None, move || {
            let _ = tell.send(of.is_alive());
        })?;
        drop(watched);
        tokio::task::yield_now().await;
        assert!(process.is_alive());
        process.kill()?;
        assert!(!ended.await?, "noticed before the end");
        Ok(())
    }
}
