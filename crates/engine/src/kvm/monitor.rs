//! `keiki-vmm` processes: blanks are executed, everything else is forked off them.

use super::{
    Host,
    control::{Control, failed},
    lineage::{Lineage, Member},
};
use crate::{
    EngineError, Result, VmPaths,
    console::tail,
    process::{Watched, blocking},
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
/// The node must be the last to go.
const OOM_SCORE_ADJ: i16 = 500;
/// How long a monitor that failed may take to end by itself.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(100);
/// Where the last words are looked for.
const TAIL: usize = 1024;

/// A process of ours, or forked off one. As a member of its lineage it counts until it is gone.
pub(super) struct Monitor {
    pub(super) watched: Watched,
    pub(super) control: Control,
    pub(super) lineage: Arc<Lineage>,
}

/// A pipe on which a copy says what goes wrong: our end, and the copy's as a descriptor of a request.
pub(super) fn complaints() -> Result<(OwnedFd, (Role, OwnedFd))> {
    let failed = |source| EngineError::Io { what: "cannot make a pipe for a monitor".into(), source };
    let (ours, theirs) = std::io::pipe().map_err(failed)?;
    Ok((ours.into(), (Role::Stderr, theirs.into())))
}

impl Monitor {
    /// Executes a blank for machines of this shape. `dir` is whose it is.
    pub(super) async fn blank(
        host: &Arc<Host>,
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
            // The top layer, which is the disk at worst and what tells where its parts are; or the memory.
            file_bytes: disk.saturating_mul(2).saturating_add(64 << 20).max(memory),
            oom_score_adj: OOM_SCORE_ADJ,
            mark: dir.display().to_string(),
        };
        let binary = host.config.binary.clone();
        let mut command = Command::new(&binary);
        command.args(start.to_args()).env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut member = lineage.admit(dir, shape.memory_mib);
        let setup = Setup { keep: vec![theirs], ..Setup::default() };
        let spawned = blocking(move || {
            Process::spawn(&mut { command }, setup).map_err(EngineError::at("start", &binary))
        });
        let (process, stderr) = spawned.await?;
        let confined = member.born(process.pid());
        let stderr = stderr.map(OwnedFd::from);
        let monitor = Self {
            watched: Watched::new(Arc::new(process), stderr, || member.ended())?,
            control: Control::over(client),
            lineage: Arc::clone(lineage),
        };
        if let Err(error) = confined {
            return Err(monitor.give_up(error).await);
        }
        match monitor.control.hello().await {
            Ok((hello, pid)) if hello.stage == Stage::Blank && pid == monitor.pid() => Ok(monitor),
            Ok(_) => Err(monitor.give_up(EngineError::Monitor("did not start as a blank".into())).await),
            Err(error) => Err(monitor.give_up(error).await),
        }
    }

    /// A process that was forked off another, and answers on `control`. What the other said of it is not believed: it
    /// must be the process that answers.
    pub(super) async fn forked(
        pid: u32,
        control: Control,
        mut member: Member,
        stage: Stage,
        complaints: OwnedFd,
    ) -> Result<(Self, keiki_control::Hello)> {
        let gone = || EngineError::Monitor("made a copy that ended at once".into());
        let process = Process::open(pid)
            .map_err(|source| EngineError::Io { what: "cannot open the monitor's process".into(), source })?;
        let process = Arc::new(process.ok_or_else(gone)?);
        let (hello, answered) = control.hello().await?;
        if answered != pid || hello.stage != stage {
            return Err(EngineError::Monitor("made a copy that is another process".into()));
        }
        let confined = member.born(pid);
        let lineage = Arc::clone(member.lineage());
        let watched = Watched::new(process, Some(complaints), || member.ended())?;
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
        tokio::time::timeout(LAST_WORDS_LIMIT, self.watched.wait()).await.is_ok()
    }

    /// Ends a process that is of no use. How it ended by itself says more than that its socket closed.
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
    pub(super) fn last_words(&self, paths: &VmPaths) -> Option<String> {
        let how = self.watched.has_ended()?;
        Some(last_words(&tail(paths, TAIL)).unwrap_or(how))
    }
}

/// A relative that works for whoever holds this, after its relatives where processors are short. It ends with this.
pub(super) struct Background(Watched);

impl Background {
    /// The process of this number, which said so itself. None: it has ended already.
    pub(super) fn watch(pid: u32, mut member: Member) -> Result<Option<Self>> {
        let failed =
            |source| EngineError::Io { what: "cannot open the process of a monitor's copy".into(), source };
        let Some(process) = Process::open(pid).map_err(failed)? else { return Ok(None) };
        // Between its word and this the number may have become another's.
        if member.lineage().user().is_some_and(|user| !process.runs_as(user)) {
            return Ok(None);
        }
        match member.born(pid) {
            Ok(()) => member.defer(),
            // It was quicker than we, or stays in the group of what it was forked off.
            Err(error) => tracing::debug!(pid, %error, "a copy that works for us has no group of its own"),
        }
        Watched::new(Arc::new(process), None, || member.ended()).map(|watched| Some(Self(watched)))
    }

    /// Waits until it is gone. It may have done its work, or never do it.
    pub(super) async fn end(self) -> Result<()> {
        self.0.kill().await
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Err(error) = self.0.process.kill() {
            tracing::warn!(pid = self.0.process.pid(), %error, "a copy that works for nobody could not be ended");
        }
    }
}

/// What a monitor said last. A guest can say the same; it is for people.
fn last_words(console: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(console);
    let words = text.lines().rev().find_map(|line| line.strip_prefix(EXIT_REASON))?;
    Some(words.chars().filter(|c| !c.is_control()).take(400).collect())
}

#[cfg(test)]
mod tests {
    use super::last_words;

    #[test]
    fn the_last_words_are_the_last_line_that_begins_as_such() {
        assert_eq!(last_words(b"boot\nkeiki-vmm: guest-reset\n").as_deref(), Some("guest-reset"));
        assert_eq!(last_words(b"keiki-vmm: one\nmore\nkeiki-vmm: two\x1b\n").as_deref(), Some("two"));
        assert_eq!(last_words(b"kernel panic, keiki-vmm: no\n"), None);
    }
}
