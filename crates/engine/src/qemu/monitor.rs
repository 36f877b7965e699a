//! A QEMU process and our connection to its control socket.

use super::{
    args::{Inherited, Launch, Sockets, command_line},
    host::Host,
    jail,
    qmp::Qmp,
    ram, ram_copy,
};
use crate::{
    EngineError, Result, VmPaths, cgroup,
    fsutil::remove_file,
    process::{Watched, blocking},
    users::User,
};
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
    sync::Arc,
    time::Duration,
};

/// How long a monitor may take to listen on its control socket.
const START: Duration = Duration::from_secs(20);

/// A monitor and our connection to it.
pub(super) struct Monitor {
    pub(super) watched: Watched,
    pub(super) qmp: Qmp,
    /// The user it runs as, if jailed. Held, so that no other gets it.
    _user: Option<User>,
}

impl Monitor {
    /// Starts a monitor and waits for its control socket.
    pub(super) async fn start(host: &Arc<Host>, launch: &Launch<'_>, user: Option<User>) -> Result<Self> {
        let binary = &host.config.binary;
        let mut command = Command::new(binary);
        let inherited = inherit(launch.paths)?;
        command.args(command_line(launch, &inherited));
        ram::preload(host, launch, &mut command)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let netns = match &launch.paths.netns {
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
            cgroup::confine(launch.paths, launch.shape, process.pid());
        }
        let monitor = Self::attach(Arc::clone(&process), launch.paths, stderr, user).await;
        let base = launch.paths.dir.join(MEMORY_FILE);
        let pid = process.pid();
        let on_image = move || {
            // If the loader ignored the library, the guest would have empty RAM.
            File::open(&base)
                .map_err(EngineError::at("open", &base))
                .and_then(|base| ram_copy::locate(pid, &base))
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
        paths: &VmPaths,
        pipe: Option<ChildStderr>,
        user: Option<User>,
    ) -> Result<Self> {
        let watched = Watched::new(process, pipe.map(OwnedFd::from), || {})?;
        let alive = || watched.has_ended().is_none();
        let qmp = Qmp::connect(&Sockets::of(paths).qmp, START, alive).await;
        let qmp = qmp.map_err(|error| match watched.stderr_line() {
            Some(line) => EngineError::Monitor(format!("did not start: {line}")),
            None => error,
        })?;
        Ok(Self { watched, qmp, _user: user })
    }

    pub(super) fn process(&self) -> &Process {
        &self.watched.process
    }

    /// How it ended, if it has.
    pub(super) fn has_ended(&self) -> Option<String> {
        let how = self.watched.has_ended()?;
        Some(self.qmp.shutdown_reason().unwrap_or(how))
    }

    /// Resolves when it has ended.
    pub(super) async fn wait(&self) -> String {
        self.watched.wait().await;
        self.has_ended().unwrap_or_else(|| "unknown".into())
    }

    /// Kills it and waits until it is gone.
    pub(super) async fn kill(&self) -> Result<()> {
        self.watched.kill().await
    }
}

/// Opens what a monitor inherits: its sockets, listening, and its tap.
fn inherit(paths: &VmPaths) -> Result<Inherited> {
    let sockets = Sockets::of(paths);
    let listen = |path: &Path| -> Result<OwnedFd> {
        remove_file(path)?;
        UnixListener::bind(path).map(OwnedFd::from).map_err(EngineError::at("listen at", path))
    };
    let tap = match &paths.netns {
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
