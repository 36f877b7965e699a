//! A machine with KVM for machines without one: runs a command in a Linux whose AMD-V QEMU emulates.
//!
//! ```text
//!   files ──> work disk ─┐                                     ┌──> console, while it runs
//!   root disk, kernel ───┼──> QEMU ──> Linux ──> the command ──┤
//!   empty XFS ───────────┘    (L1; its guests are L2)          └──> /lab/out, exit status
//! ```
//!
//! Everything enters and leaves on disks, so nothing of the host is shared with the lab: root disk and kernel come from
//! the image cache, [`disk::WorkDisk`] carries the given files in and what the command left in `/lab/out` out again. The
//! root disk is used with a snapshot, so each run begins with the same machine. What a run needs lies in
//! a directory of its own below `.keiki/lab/`, and goes with it; QEMU dies with this process.
//!
//! Times in there say nothing about hardware. Ratios of two things of one run do, a little.

mod disk;
mod parts;
mod qemu;

use anyhow::{Context, Result, bail};
use clap::Parser;
use disk::WorkDisk;
use parts::Parts;
use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

/// Runs a command as root in a machine whose KVM runs Linux guests, and ends with its status.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask lab")]
pub(crate) struct Args {
    /// A file or directory the command finds as /lab/in/NAME.
    #[arg(long, value_name = "PATH[:NAME]")]
    put: Vec<Put>,
    /// Puts the image cache into the lab as /lab/cache, so that a node there fetches nothing.
    #[arg(long)]
    cache: bool,
    /// A variable of the command's environment.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Where what the command leaves in /lab/out is to be copied; made if missing.
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
    /// Memory of the machine.
    #[arg(long, default_value_t = 6144, value_parser = clap::value_parser!(u32).range(512..=65536))]
    memory_mib: u32,
    /// Processors of the machine. With more than one, code that its kernel patches was seen to run unpatched on another.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    cpus: u32,
    /// Size of the file system with reflinks at /store.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=1024))]
    store_gib: u32,
    /// Seconds after which the machine is ended, booting included.
    #[arg(long, default_value_t = 900, value_parser = clap::value_parser!(u64).range(1..=86400))]
    limit: u64,
    /// The command; it starts in /lab/in.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// A file or directory and the name it gets in the lab.
#[derive(Debug, Clone)]
struct Put {
    source: PathBuf,
    name: String,
}

impl std::str::FromStr for Put {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (source, name) = match text.rsplit_once(':') {
            Some((source, name)) => (PathBuf::from(source), Some(name.to_owned())),
            None => (PathBuf::from(text), None),
        };
        let own = || source.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let name = name.or_else(own).with_context(|| format!("`{text}` names no file"))?;
        if name.is_empty() || name.starts_with('/') || name.split('/').any(|part| part == "..") {
            bail!("`{name}` is not a name below /lab/in: use a relative path without `..`");
        }
        Ok(Self { source, name })
    }
}

/// Runs `cargo xtask lab ARGS`.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let args = Args::parse_from([&["lab".to_owned()], args].concat());
    for line in &args.env {
        if !line.split_once('=').is_some_and(|(name, _)| is_variable(name)) {
            bail!("`{line}` sets no variable: write NAME=VALUE");
        }
    }
    let state = crate::root()?.join(".keiki/lab");
    let parts = Parts::build(&state)?;
    for attempt in 1..=ATTEMPTS {
        if let Some(status) = attempt_to_run(&args, &parts, &state, attempt > 1)? {
            return Ok(status);
        }
        eprintln!("lab: its machine ended before the command did ({attempt} of {ATTEMPTS} attempts)");
    }
    bail!("the lab's machine ended before the command did, each time: the end of its console output is above")
}

/// The lab's own kernel was seen to crash, now and then, on the emulated processor. That says nothing of what runs in it.
const ATTEMPTS: u32 = 3;

/// Runs the command in a new machine, where it finds what it left in the one before. None: the machine did not last until
/// its end.
fn attempt_to_run(args: &Args, parts: &Parts, state: &Path, again: bool) -> Result<Option<ExitCode>> {
    let place = Place::new(state)?;
    let left = args.out.as_deref().filter(|_| again);
    let disk = WorkDisk::build(&place.dir, args, parts, left)?;
    let limit = Duration::from_secs(args.limit);
    let ended = qemu::run(&qemu::Machine {
        parts,
        work: disk.path(),
        store: &disk::store(&place.dir, args.store_gib)?,
        logs: &place.dir,
        memory_mib: args.memory_mib,
        cpus: args.cpus,
        limit,
    })?;
    // Also of a command that was cut short: its logs say why.
    if let Some(out) = &args.out {
        disk.copy_out(out)?;
    }
    if ended == qemu::Ended::TimedOut {
        bail!("the lab was ended after {} s; --limit allows more", args.limit);
    }
    let status = disk.status()?;
    if status.is_none() {
        eprintln!("{}", qemu::console_tail(&place.dir));
    }
    Ok(status)
}

fn is_variable(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The directory of one run. It goes with the run; what a killed one left goes with the next.
struct Place {
    dir: PathBuf,
    /// Held while the run lasts: who gets it may remove the directory.
    _lock: File,
}

impl Place {
    fn new(state: &Path) -> Result<Self> {
        let runs = state.join("runs");
        fs::create_dir_all(&runs)?;
        for entry in fs::read_dir(&runs)? {
            let dir = entry?.path();
            match File::create(dir.join("lock")).map(|file| file.try_lock()) {
                Ok(Err(TryLockError::WouldBlock)) => {}
                _ => fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?,
            }
        }
        let dir = runs.join(std::process::id().to_string());
        fs::create_dir_all(&dir)?;
        let lock = File::create(dir.join("lock"))?;
        lock.lock()?;
        Ok(Self { dir, _lock: lock })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            eprintln!("lab: {} was not removed: {error}", self.dir.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_has_a_name_inside() {
        let put: Put = "target/debug/keiki".parse().unwrap();
        assert_eq!((put.source.to_str(), put.name.as_str()), (Some("target/debug/keiki"), "keiki"));
        let put: Put = "a/b:bin/c".parse().unwrap();
        assert_eq!(put.name, "bin/c");
        for bad in ["a:", "a:/etc/x", "a:b/../../c", "/"] {
            assert!(bad.parse::<Put>().is_err(), "{bad}");
        }
    }

    #[test]
    fn variables() {
        assert!(is_variable("KEIKI_ENGINE") && is_variable("_a1"));
        for bad in ["", "1a", "a b", "a;b", "a$(x)"] {
            assert!(!is_variable(bad), "{bad}");
        }
    }

    #[test]
    fn a_run_in_progress_keeps_its_place() {
        let state = tempfile::tempdir().unwrap();
        let left = state.path().join("runs/1");
        fs::create_dir_all(&left).unwrap();
        let taken = state.path().join("runs/2");
        fs::create_dir_all(&taken).unwrap();
        let lock = File::create(taken.join("lock")).unwrap();
        lock.lock().unwrap();
        let place = Place::new(state.path()).unwrap();
        assert!(!left.exists(), "what a killed run left is still there");
        assert!(taken.exists(), "the place of a run in progress is gone");
        let dir = place.dir.clone();
        drop(place);
        assert!(!dir.exists());
    }
}
