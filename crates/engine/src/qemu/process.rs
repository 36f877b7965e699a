//! A monitor process: started apart, watched by descriptor, killed by descriptor.
//!
//! Monitors outlive the daemon, so nothing here ends one by being dropped, except a seat's (see `thaw`).
//! Standard error is a pipe that we drain into a small buffer: a monitor that complains without end fills
//! no disk, and when the daemon is gone its complaints go nowhere.

use super::{
    Host,
    args::{Inherited, Launch, Sockets, command_line},
    cgroup,
    jail::{self, User},
    memory,
    qmp::Qmp,
    ram,
};
use crate::{EngineError, Resources, Result};
use keiki_protocol::net::TAP;
use keiki_snapshot::MEMORY_FILE;
use keiki_sys::{
    netns,
    process::{Process, Setup},
    tap,
};
use std::{
    fs::File,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
    process::{ChildStderr, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, Interest, unix::AsyncFd},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};

/// How long a monitor may take to listen on its control socket.
const START: Duration = Duration::from_secs(20);
/// How long a killed monitor may take to be gone: it unmaps its RAM.
const KILL: Duration = Duration::from_secs(10);
/// What is kept of a monitor's standard error.
const STDERR_KEPT: usize = 4096;

/// A task that ends with its owner.
pub(super) struct Task(pub(super) JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A monitor and our connection to it.
pub(super) struct Monitor {
    pub(super) process: Arc<Process>,
    pub(super) qmp: Qmp,
    /// The user it runs as, if jailed. Held, so that no other gets it.
    _user: Option<User>,
    stderr: Arc<Mutex<Vec<u8>>>,
    /// How the process ended.
    ended: watch::Receiver<Option<String>>,
    _tasks: Vec<Task>,
}

impl Monitor {
    /// Starts a monitor and waits for its control socket.
    pub(super) async fn start(host: &Arc<Host>, launch: &Launch<'_>, user: Option<User>) -> Result<Self> {
        let binary = &host.config.binary;
        let mut command = Command::new(binary);
        let inherited = inherit(launch.resources)?;
        command.args(command_line(launch, &inherited));
        ram::preload(host, launch, &mut command)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let netns = match &launch.resources.netns {
            Some(path) => Some(File::open(path).map_err(EngineError::at("open", path))?.into()),
            None => None,
        };
        let jail = match &user {
            Some(user) => Some(jail::build(host, user.id(), launch)?),
            None => None,
        };
        let Inherited { qmp, agent, console, tap } = inherited;
        let keep = [qmp, agent, console].into_iter().chain(tap).collect();
        let setup = Setup { netns, keep, jail };
        let path = binary.to_owned();
        // Our ends of what it inherits are closed with the command.
        let (process, stderr) = blocking(move || {
            Process::spawn(&mut { command }, setup).map_err(EngineError::at("start", &path))
        })
        .await?;
        let process = Arc::new(process);
        keiki_sys::failpoint::reach("monitor");
        if user.is_some() {
            cgroup::confine(launch.resources, launch.shape, process.pid());
        }
        let monitor = Self::attach(Arc::clone(&process), launch.resources, stderr, user).await;
        let base = launch.resources.dir.join(MEMORY_FILE);
        let pid = process.pid();
        let on_image = move || {
            // A loader that took the library for nothing would leave a guest with empty RAM.
            File::open(&base)
                .map_err(EngineError::at("open", &base))
                .and_then(|base| memory::locate(pid, &base))
        };
        let checked = match monitor {
            Ok(monitor) => blocking(on_image).await.map(|_| monitor),
            Err(error) => Err(error),
        };
        match checked {
            Ok(monitor) => Ok(monitor),
            Err(error) => {
                process.kill().map_err(EngineError::at("kill", binary))?;
                Err(error)
            }
        }
    }

    /// Connects to a monitor that runs.
    pub(super) async fn attach(
        process: Arc<Process>,
        resources: &Resources,
        pipe: Option<ChildStderr>,
        user: Option<User>,
    ) -> Result<Self> {
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        if let Some(pipe) = pipe {
            let pipe = tokio::net::unix::pipe::Receiver::from_owned_fd(pipe.into())
                .map_err(EngineError::at("watch", &resources.run_dir))?;
            tasks.push(Task(tokio::spawn(drain(pipe, Arc::clone(&stderr)))));
        }
        let (told, ended) = watch::channel(None);
        // The safe constructor: its worry, a descriptor that changes while watched, cannot come from `Process`.
        #[expect(deprecated)]
        let watched = AsyncFd::with_interest(Arc::clone(&process), Interest::READABLE)
            .map_err(EngineError::at("watch", &resources.run_dir))?;
        // Not aborted with us: whoever dies while nobody looks must still be reaped.
        tokio::spawn(reap(watched, told));
        let alive = || ended.borrow().is_none();
        let qmp = Qmp::connect(&Sockets::of(resources).qmp, START, alive).await;
        let qmp = qmp.map_err(|error| match complaint(&stderr) {
            Some(complaint) => EngineError::Monitor(format!("did not start: {complaint}")),
            None => error,
        })?;
        Ok(Self { process, qmp, _user: user, stderr, ended, _tasks: tasks })
    }

    /// How it ended, if it has.
    pub(super) fn has_ended(&self) -> Option<String> {
        let how = self.ended.borrow().clone()?;
        Some(match (self.qmp.shutdown_reason(), complaint(&self.stderr)) {
            (Some(reason), _) => reason,
            (None, Some(complaint)) => format!("{how}: {complaint}"),
            (None, None) => how,
        })
    }

    /// Resolves when it has ended.
    pub(super) async fn wait(&self) -> String {
        let mut ended = self.ended.clone();
        // An error means that the runtime shuts down: nothing more will be known.
        let _ = ended.wait_for(Option::is_some).await;
        self.has_ended().unwrap_or_else(|| "unknown".into())
    }

    /// Kills it and waits until it is gone.
    pub(super) async fn kill(&self) -> Result<()> {
        kill(&self.process)?;
        timeout(KILL, self.wait()).await.map_err(|_| EngineError::Monitor("does not die".into()))?;
        Ok(())
    }
}

/// Opens what a monitor inherits: its sockets, listening, and its tap.
fn inherit(resources: &Resources) -> Result<Inherited> {
    let sockets = Sockets::of(resources);
    let listen = |path: &Path| -> Result<OwnedFd> {
        remove_file(path)?;
        UnixListener::bind(path).map(OwnedFd::from).map_err(EngineError::at("listen at", path))
    };
    let tap = match &resources.netns {
        Some(netns) => {
            let tap = netns::inside(netns, || tap::open_offloading(TAP));
            Some(tap.map_err(EngineError::at("open the tap in", netns))?.into())
        }
        None => None,
    };
    Ok(Inherited {
        qmp: listen(&sockets.qmp)?,
        agent: listen(&sockets.agent)?,
        console: listen(&sockets.console)?,
        tap,
    })
}

fn kill(process: &Process) -> Result<()> {
    process.kill().map_err(|source| EngineError::Io { what: "cannot kill the monitor".into(), source })
}

/// The last line of what it wrote to standard error.
fn complaint(stderr: &Mutex<Vec<u8>>) -> Option<String> {
    let bytes = stderr.lock().unwrap_or_else(PoisonError::into_inner);
    let text = String::from_utf8_lossy(&bytes);
    // Said at every start or load, and harmless.
    let harmless = ["Expected vmdescription", "is not connected to host network"];
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .rfind(|line| !harmless.iter().any(|known| line.contains(known)))
        .map(|line| line.chars().take(400).collect())
}

async fn drain(mut pipe: tokio::net::unix::pipe::Receiver, kept: Arc<Mutex<Vec<u8>>>) {
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(buffer.iter().take(count));
        let excess = kept.len().saturating_sub(STDERR_KEPT);
        kept.drain(..excess);
    }
}

async fn reap(watched: AsyncFd<Arc<Process>>, told: watch::Sender<Option<String>>) {
    loop {
        let ready = watched.readable().await;
        if let Some(how) = watched.get_ref().try_reap() {
            told.send_replace(Some(how));
            return;
        }
        match ready {
            Ok(mut guard) => guard.clear_ready(),
            Err(_) => return,
        }
    }
}

/// Runs what blocks off the async threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| EngineError::Monitor(format!("task failed: {error}")))?
}

/// Removes a file. Gone already: no error.
pub(super) fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(EngineError::at("remove", path)(error))
        }
        _ => Ok(()),
    }
}
