//! Runs an external program: its output becomes progress, its last lines go into the error.

use crate::error::{Error, Result, io_error};
use std::{
    collections::VecDeque,
    ffi::OsStr,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    process::{Command, Output, Stdio},
    sync::Mutex,
    thread,
};

/// Lines kept for the error of a program.
const TAIL_LINES: usize = 12;
/// Longer lines are cut: a program must not fill our memory.
const LINE_BYTES: u64 = 4096;

/// The programs used here, and the Debian package of each.
const PACKAGES: &[(&str, &str)] = &[
    ("apt-get", "apt"),
    ("apt-cache", "apt"),
    ("apt-config", "apt"),
    ("chroot", "coreutils"),
    ("depmod", "kmod"),
    ("dpkg-deb", "dpkg"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mmdebstrap", "mmdebstrap"),
    ("python3", "python3-venv"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
];

/// Starts a leashed tool. The first program is killed when we end, and its end kills the rest.
const LEASH: [&str; 8] = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--pid", "--kill-child", "--"];

/// Messages of apt and mmdebstrap when the mirror cannot be reached.
const NETWORK_SIGNS: &[&str] = &[
    "Temporary failure resolving",
    "Could not resolve",
    "Network is unreachable",
    "No route to host",
    "Unable to connect",
    "Could not connect",
    "Cannot initiate the connection",
    "Connection timed out",
    "Connection failed",
];

/// One run of a program.
pub(crate) struct Tool {
    name: &'static str,
    action: String,
    command: Command,
}

impl Tool {
    /// `action` completes "failed while …".
    pub(crate) fn new(name: &'static str, action: impl Into<String>) -> Self {
        Self::of(name, action, Command::new(name))
    }

    /// A tool that ends with us, and with it everything it has started, however we end: the kernel
    /// kills the first process of its PID namespace, and with that all others. `program` is the
    /// path of `name`. Without root there is no such namespace, and the tool may outlive us.
    pub(crate) fn leashed(name: &'static str, program: &Path, action: impl Into<String>) -> Self {
        if !is_there(program) || !rustix::process::geteuid().is_root() {
            return Self::of(name, action, Command::new(program));
        }
        let mut command = Command::new(LEASH[0]);
        command.args(&LEASH[1..]).arg(program);
        Self::of(name, action, command)
    }

    fn of(name: &'static str, action: impl Into<String>, mut command: Command) -> Self {
        // English output for our parsers, sbin directories in PATH, and no questions.
        command
            .env("LC_ALL", "C.UTF-8")
            .env("PATH", search_path())
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null());
        Self { name, action: action.into(), command }
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Holds the cache's lock as long as the program lives, even if it outlives us: the lock is its
    /// standard input, which no other process inherits.
    pub(crate) fn holding(mut self, lock: &File) -> Result<Self> {
        self.command.stdin(lock.try_clone().map_err(io_error("sharing", "lock"))?);
        Ok(self)
    }

    pub(crate) fn dir(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Runs it and returns its standard output.
    pub(crate) fn output(mut self) -> Result<Vec<u8>> {
        let Output { status, stdout, stderr } = self.command.output().map_err(|e| self.spawn_error(e))?;
        if status.success() {
            return Ok(stdout);
        }
        let mut tail = Tail::default();
        String::from_utf8_lossy(&stderr).lines().for_each(|line| tail.push(line));
        Err(self.failure(status.to_string(), &tail))
    }

    /// Runs it and passes on each line of its standard output and error. Both are our pipes, so a
    /// program that outlives us ends at its next write.
    pub(crate) fn lines(mut self, mut on_line: impl FnMut(&str) + Send) -> Result<()> {
        self.command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().map_err(|e| self.spawn_error(e))?;
        let pipes = (child.stdout.take(), child.stderr.take());
        let mut tail = Tail::default();
        let sink = Mutex::new(|line: &str| {
            tail.push(line);
            on_line(line);
        });
        thread::scope(|scope| {
            scope.spawn(|| read_lines(pipes.0, &sink));
            read_lines(pipes.1, &sink);
        });
        let status = child.wait().map_err(|e| self.spawn_error(e))?;
        if status.success() { Ok(()) } else { Err(self.failure(status.to_string(), &tail)) }
    }

    fn spawn_error(&self, source: io::Error) -> Error {
        if source.kind() != io::ErrorKind::NotFound {
            return io_error("running", self.name)(source);
        }
        let package = PACKAGES.iter().find(|(tool, _)| *tool == self.name).map_or("that has it", |(_, p)| p);
        Error::ToolMissing { tool: self.name.to_owned(), package }
    }

    fn failure(&self, status: String, tail: &Tail) -> Error {
        let text = tail.text();
        let (tool, action) = (self.name.to_owned(), self.action.clone());
        if text.contains("No space left on device") {
            let path = self.command.get_current_dir().unwrap_or(Path::new(".")).to_owned();
            Error::NoSpace { path, action }
        } else if NETWORK_SIGNS.iter().any(|sign| text.contains(sign)) {
            Error::NoNetwork { tool, action, tail: text }
        } else {
            Error::ToolFailed { tool, action, status, tail: text }
        }
    }
}

/// The caller's PATH with the sbin directories, which ordinary users lack.
fn search_path() -> String {
    let inherited = std::env::var("PATH").unwrap_or_default();
    let separator = if inherited.is_empty() { "" } else { ":" };
    format!("{inherited}{separator}/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
}

/// Whether a program of this name or path exists.
fn is_there(program: &Path) -> bool {
    program.components().count() > 1 && program.exists()
        || std::env::split_paths(&search_path()).any(|dir| dir.join(program).is_file())
}

fn read_lines(pipe: Option<impl Read>, sink: &Mutex<impl FnMut(&str)>) {
    let Some(pipe) = pipe else { return };
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        match pipe.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if let Ok(mut sink) = sink.lock() {
                    sink(String::from_utf8_lossy(&line).trim_end());
                }
            }
        }
    }
}

/// The last lines of a program's output.
#[derive(Default)]
struct Tail(VecDeque<String>);

impl Tail {
    fn push(&mut self, line: &str) {
        // apt's machine-readable progress does not explain a failure.
        if line.is_empty() || line.starts_with("dlstatus:") || line.starts_with("pmstatus:") {
            return;
        }
        if self.0.len() == TAIL_LINES {
            self.0.pop_front();
        }
        self.0.push_back(line.to_owned());
    }

    fn text(&self) -> String {
        self.0.iter().map(|line| format!("  {line}\n")).collect::<String>().trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let error = Tool::new("mmdebstrap", "x").env("PATH", "/nowhere").output().unwrap_err();
        assert_eq!(error.to_string(), "`mmdebstrap` is missing: install the package mmdebstrap");
    }

    #[test]
    fn a_failure_carries_the_last_words() {
        let script = "seq 1 5; echo 'last words' >&2; exit 3";
        let mut seen = 0;
        let error = Tool::new("sh", "counting").args(["-c", script]).lines(|_| seen += 1).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("`sh` failed while counting (exit status: 3)"), "{text}");
        assert!(text.contains("last words"), "{text}");
        assert_eq!(seen, 6);
    }

    #[test]
    fn a_full_disk_and_no_network_are_recognised() {
        let full = Tool::new("sh", "x").args(["-c", "echo 'write: No space left on device' >&2; exit 1"]);
        assert!(matches!(full.output(), Err(Error::NoSpace { .. })));
        let unplugged =
            Tool::new("sh", "x").args(["-c", "echo 'E: Temporary failure resolving m' >&2; exit 100"]);
        assert!(matches!(unplugged.output(), Err(Error::NoNetwork { .. })));
    }

    #[test]
    fn a_leashed_tool_is_like_any_other() {
        let sh = |script: &str| Tool::leashed("sh", Path::new("sh"), "x").args(["-c", script]);
        assert_eq!(sh("echo there").output().unwrap(), b"there\n");
        let text = sh("echo 'last words' >&2; exit 3").output().unwrap_err().to_string();
        assert!(
            text.contains("`sh` failed while x (exit status: 3)") && text.contains("last words"),
            "{text}"
        );
        let missing =
            Tool::leashed("mmdebstrap", Path::new("/nowhere/mmdebstrap"), "x").output().unwrap_err();
        assert_eq!(missing.to_string(), "`mmdebstrap` is missing: install the package mmdebstrap");
    }

    /// The process that dies is this test program, started a second time.
    #[test]
    fn a_leashed_tool_and_what_it_started_end_with_us() {
        const MARK: &str = "KEIKI_TEST_LEASH";
        if let Ok(file) = std::env::var(MARK) {
            let script = format!("sleep 7301 & echo $$ >{file}.new; mv {file}.new {file}; wait");
            Tool::leashed("sh", Path::new("sh"), "x").args(["-c", &script]).output().unwrap();
            return;
        }
        if !keiki_testing::is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("started");
        let mut us = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tool::tests::a_leashed_tool_and_what_it_started_end_with_us"])
            .env(MARK, &file)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let of_file = |pid: &str| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&*file.to_string_lossy())
        };
        let living = || {
            let all = std::fs::read_dir("/proc").unwrap().flatten();
            all.filter(|entry| of_file(&entry.file_name().to_string_lossy())).count()
        };
        let until = |done: &dyn Fn() -> bool| {
            (0..1000).any(|_| {
                done() || {
                    thread::sleep(std::time::Duration::from_millis(10));
                    false
                }
            })
        };
        assert!(until(&|| file.exists()), "it did not start");
        assert!(living() > 0);
        us.kill().unwrap();
        us.wait().unwrap();
        assert!(until(&|| living() == 0), "the tool lives on");
    }

    #[test]
    fn an_endless_line_is_cut() {
        let mut longest = 0;
        Tool::new("sh", "x")
            .args(["-c", "head -c 100000 /dev/zero | tr '\\0' a"])
            .lines(|line| longest = longest.max(line.len()))
            .unwrap();
        assert_eq!(longest as u64, LINE_BYTES);
    }
}
