//! Runs one stage. Its output goes to its log and to the terminal: line by line, or at the end if another stage has the
//! terminal.

use super::{Outcome, Settings, count, stage::Stage};
use anyhow::{Context, Result};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

/// The right to print. One stage has it at a time.
#[derive(Debug, Default)]
pub(super) struct Terminal(Mutex<()>);

impl Terminal {
    fn free(&self) -> Option<MutexGuard<'_, ()>> {
        match self.0.try_lock() {
            Ok(terminal) => Some(terminal),
            Err(TryLockError::Poisoned(terminal)) => Some(terminal.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn wait(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The process groups of running stages.
static GROUPS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// Passes SIGINT and SIGTERM on to the running stages; each is a process group.
pub(super) fn forward_signals() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("catching signals")?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            for group in groups().iter() {
                let _ = Command::new("kill").args(["-INT", "--", &format!("-{group}")]).status();
            }
            // Stages unmount what they mounted and stop their nodes first.
            std::thread::spawn(|| {
                while !groups().is_empty() {
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
                std::process::exit(130);
            });
        }
    });
    Ok(())
}

fn groups() -> MutexGuard<'static, BTreeSet<i32>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a stage to its end.
pub(super) fn stage(settings: &Settings, stage: &Stage, terminal: &Terminal) -> Result<Outcome> {
    let begun = Instant::now();
    let logs = settings.state("logs");
    fs::create_dir_all(&logs)?;
    let path = logs.join(format!("{}.log", stage.name));
    let mut log = File::create(&path)?;
    let mut ok = true;
    let printing = terminal.free();
    println!("== {}{}", stage.name, if printing.is_some() { "" } else { " (in parallel)" });
    for command in stage.commands(settings) {
        ok &= run(command, settings, &mut log, printing.is_some())?;
    }
    let output = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
    let tally = count::count(&output, ok);
    let seconds = begun.elapsed().as_secs();
    let word = match (tally.failed, count::is_skipped(&output)) {
        (0, false) => "ok",
        (0, true) => "skipped",
        _ => "FAILED",
    };
    let _printing = printing.unwrap_or_else(|| {
        let terminal = terminal.wait();
        print!("== {}\n{output}", stage.name);
        terminal
    });
    println!("== {}: {word}, {} passed, {} failed, {seconds} s", stage.name, tally.passed, tally.failed);
    Ok(Outcome { name: stage.name.to_owned(), word: word.to_owned(), tally, seconds })
}

/// Whether the command succeeded.
fn run(mut command: Command, settings: &Settings, log: &mut File, prints: bool) -> Result<bool> {
    let (reader, writer) = std::io::pipe()?;
    command.current_dir(&settings.root).process_group(0).stdin(Stdio::null());
    command.stdout(writer.try_clone()?).stderr(writer);
    if std::env::var_os("KEIKI_TEST_STRICT").is_none() {
        command.env("KEIKI_TEST_STRICT", "1");
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            writeln!(log, "{}: {error}", command.get_program().display())?;
            return Ok(false);
        }
    };
    // Closes our copies of the writing end, so that reading ends with the child.
    drop(command);
    let group = i32::try_from(child.id())?;
    groups().insert(group);
    for line in BufReader::new(reader).split(b'\n') {
        let mut line = line?;
        line.push(b'\n');
        log.write_all(&line)?;
        if prints {
            std::io::stdout().write_all(&line)?;
        }
    }
    let status = child.wait()?;
    groups().remove(&group);
    Ok(status.success())
}
