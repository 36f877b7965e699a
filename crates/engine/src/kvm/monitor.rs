//! `keiki-vmm` processes: blanks are executed, everything else is forked off them.

use super::{
    control::{Control, failed},
    lineage::{Lineage, Member},
};
use crate::{
    EngineError, Result, VmPaths,
    console::tail,
    process::{self, Watched, blocking},
    record::CONTROL,
};
use keiki_control::{Client, EXIT_REASON, Role, Stage, Start};
use keiki_sys::process::{Process, Setup};
use keiki_types::Shape;
use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

/// Descriptors: a chain of layers, sockets, eventfds, and what a request brings.
const FILES: u64 = 512;
/// Threads of all relatives: each machine has one, and one for each vCPU.
const TASKS: u64 = 16_384;
/// The node must be the last to be killed.
const OOM_SCORE_ADJ: i16 = 500;
/// How long a monitor that failed may take to end.
const END_LIMIT: Duration = Duration::from_millis(100);
/// Where the reason is looked for, in bytes from the end of the console.
const TAIL: usize = 1024;

/// A process of ours, or forked off one. As a member of its lineage it counts until it is gone.
pub(super) struct Monitor {
    pub(super) watched: Watched,
    pub(super) control: Control,
    pub(super) lineage: Arc<Lineage>,
}

/// A zygote. Its process ends with it.
pub(super) struct Zygote {
    pub(super) monitor: Monitor,
    /// How many freezes lie between it and stored files.
    pub(super) generation: u32,
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // It ends when its socket closes; a hostile one does not.
        if let Err(error) = self.monitor.watched.process.kill() {
            tracing::warn!(%error, "cannot end a zygote");
        }
    }
}

/// A pipe for the standard error of a copy: our end, and the copy's as a descriptor of a request.
pub(super) fn stderr_pipe() -> Result<(OwnedFd, (Role, OwnedFd))> {
    let failed = |source| EngineError::Io { what: "cannot create a pipe for a monitor".into(), source };
    let (ours, theirs) = std::io::pipe().map_err(failed)?;
    Ok((ours.into(), (Role::Stderr, theirs.into())))
}

impl Monitor {
    /// Executes a blank for machines of this shape. `dir` is the directory of what it becomes.
    pub(super) async fn blank(
        binary: &Path,
        lineage: &Arc<Lineage>,
        shape: Shape,
        dir: &Path,
    ) -> Result<Self> {
        let (client, theirs) = Client::pair().map_err(failed)?;
        let disk = u64::from(shape.disk_mib) << 20;
        let memory = u64::from(shape.memory_mib) << 20;
        let start = Start {
            control: theirs.as_raw_fd(),
            user: lineage.user(),
            files: FILES,
            tasks: TASKS,
            // The top layer, which is at worst the disk and its tables; or the memory.
            file_bytes: disk.saturating_mul(2).saturating_add(64 << 20).max(memory),
            oom_score_adj: OOM_SCORE_ADJ,
            mark: dir.display().to_string(),
        };
        let binary = binary.to_owned();
        let mut command = Command::new(&binary);
        command.args(start.to_args()).env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut member = lineage.admit(dir, shape.memory_mib);
        let setup = Setup { keep: vec![theirs], ..Setup::default() };
        let spawned = blocking(move || {
            Process::spawn(&mut { command }, setup).map_err(EngineError::at("start", &binary))
        });
        let (process, stderr) = spawned.await?;
        let confined = member.attach(process.pid());
        let stderr = stderr.map(OwnedFd::from);
        let monitor = Self {
            watched: Watched::new(Arc::new(process), stderr, || member.ended())?,
            control: Control::over(client),
            lineage: Arc::clone(lineage),
        };
        if let Err(error) = confined {
            return Err(monitor.give_up(error).await);
        }
        match monitor.control.expect(Stage::Blank, monitor.pid()).await {
            Ok(_) => Ok(monitor),
            Err(error) => Err(monitor.give_up(error).await),
        }
    }

    /// The machine with these paths, if it answers. Its process is ended if not.
    pub(super) async fn answering(self, paths: &VmPaths) -> Result<Self> {
        match self.control.expect(Stage::Machine, self.pid()).await {
            Ok(_) => Ok(self),
            Err(error) => {
                let how = self.exit_reason(paths);
                Err(self.give_up(how.map_or(error, EngineError::Ended)).await)
            }
        }
    }

    /// A process that was forked off another. Whatever the other reported, it must be the process
    /// that answers on `control`.
    pub(super) async fn forked(
        pid: u32,
        control: Control,
        mut member: Member,
        stage: Stage,
        stderr: OwnedFd,
    ) -> Result<(Self, keiki_control::Hello)> {
        let gone = || EngineError::Monitor("forked a copy that exited immediately".into());
        let process = Process::open(pid)
            .map_err(|source| EngineError::Io { what: "cannot open the monitor's process".into(), source })?;
        let process = Arc::new(process.ok_or_else(gone)?);
        let hello = control.expect(stage, pid).await?;
        let confined = member.attach(pid);
        let lineage = Arc::clone(member.lineage());
        let watched = Watched::new(process, Some(stderr), || member.ended())?;
        let monitor = Self { watched, control, lineage };
        match confined {
            Ok(()) => Ok((monitor, hello)),
            Err(error) => Err(monitor.give_up(error).await),
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.watched.process.pid()
    }

    /// Whether it has ended, or is about to: its socket closes before it is gone.
    pub(super) async fn ends(&self) -> bool {
        tokio::time::timeout(END_LIMIT, self.watched.wait()).await.is_ok()
    }

    /// Ends a process after an error. If it has ended already, how it ended explains more than the
    /// error.
    pub(super) async fn give_up(self, error: EngineError) -> EngineError {
        let ended = self.ends().await;
        if let Err(error) = self.watched.kill().await {
            return error;
        }
        match self.watched.has_ended() {
            Some(how) if ended => EngineError::Monitor(format!("ended: {how}")),
            _ => error,
        }
    }

    /// How a machine's process ended, if it has.
    pub(super) fn exit_reason(&self, paths: &VmPaths) -> Option<String> {
        let how = self.watched.has_ended()?;
        Some(exit_reason(&tail(paths, TAIL)).unwrap_or(how))
    }
}

/// A relative that does background work, at a lower priority. It ends when this is dropped.
pub(super) struct Background(Watched);

impl Background {
    /// The process that sent this number. None: it has ended.
    pub(super) fn watch(pid: u32, mut member: Member) -> Result<Option<Self>> {
        let failed =
            |source| EngineError::Io { what: "cannot open the process of a monitor's copy".into(), source };
        let Some(process) = Process::open(pid).map_err(failed)? else { return Ok(None) };
        // The number may have become another process's since.
        if member.lineage().user().is_some_and(|user| !process.runs_as(user)) {
            return Ok(None);
        }
        match member.attach(pid) {
            Ok(()) => member.defer(),
            // It has ended already, or stays in the group of its parent.
            Err(error) => tracing::debug!(pid, %error, "a background copy has no control group"),
        }
        Watched::new(Arc::new(process), None, || member.ended()).map(|watched| Some(Self(watched)))
    }

    /// Kills it and waits until it is gone, whether its work is done or not.
    pub(super) async fn end(self) -> Result<()> {
        self.0.kill().await
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Err(error) = self.0.process.kill() {
            tracing::warn!(pid = self.0.process.pid(), %error, "cannot end a background copy");
        }
    }
}

/// Ends the machine that listens with these paths, if there is one: a thaw that failed after its
/// fork, or one that the node did not live to record. It is gone when this returns.
pub(super) async fn end_unrecorded(paths: &VmPaths) -> Result<()> {
    let control = Control::at(paths.run_dir.join(CONTROL));
    let Ok((_, pid)) = control.hello().await else { return Ok(()) };
    let opened = Process::open(pid).map_err(EngineError::at("open a process of", &paths.dir))?;
    let Some(process) = opened else { return Ok(()) };
    // Asked again now that the number is pinned: it may have become another process's since.
    if control.hello().await.is_ok_and(|(_, again)| again == pid) {
        tracing::warn!(pid, dir = %paths.dir.display(), "ending a machine that was never recorded");
        process::end(&process).await?;
    }
    Ok(())
}

/// Why a monitor ended, as it wrote last. A guest can write the same; it is for people only.
fn exit_reason(console: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(console);
    let reason = text.lines().rev().find_map(|line| line.strip_prefix(EXIT_REASON))?;
    Some(reason.chars().filter(|c| !c.is_control()).take(400).collect())
}

#[cfg(test)]
mod tests {
    use super::exit_reason;

    #[test]
    fn the_reason_is_the_last_line_of_the_monitor() {
        assert_eq!(exit_reason(b"boot\nkeiki-vmm: guest-reset\n").as_deref(), Some("guest-reset"));
        assert_eq!(exit_reason(b"keiki-vmm: one\nmore\nkeiki-vmm: two\x1b\n").as_deref(), Some("two"));
        assert_eq!(exit_reason(b"kernel panic, keiki-vmm: no\n"), None);
    }
}
