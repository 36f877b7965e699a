//! The machine: QEMU, whose emulated processor has AMD-V with nested paging.
//!
//! The command's words come through a virtio console: a serial port takes an exit for each byte. The kernel has the
//! serial port, whose words are shown only where the machine failed.

use super::parts::Parts;
use anyhow::{Context, Result, bail};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Each emulated processor keeps what it translated.
const TRANSLATED_MIB: u32 = 1024;
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet loglevel=3 mitigations=off";
const QEMU_LOG: &str = "qemu.log";
const KERNEL_LOG: &str = "kernel.log";
const LAST_LINES: usize = 30;
const STEP: Duration = Duration::from_millis(50);

/// What is to run.
pub(super) struct Machine<'a> {
    pub(super) parts: &'a Parts,
    pub(super) work: &'a Path,
    pub(super) store: &'a Path,
    /// What QEMU says, and what the kernel does.
    pub(super) logs: &'a Path,
    pub(super) memory_mib: u32,
    pub(super) cpus: u32,
    pub(super) limit: Duration,
}

/// How it ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended {
    PoweredOff,
    TimedOut,
}

/// The end of what the machine's kernel said.
pub(super) fn console_tail(logs: &Path) -> String {
    let text = fs::read(logs.join(KERNEL_LOG)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

/// Runs it until it powers off, with its console on our output.
pub(super) fn run(machine: &Machine) -> Result<Ended> {
    let log = File::create(machine.logs.join(QEMU_LOG))?;
    // The machine ends with us, however we end.
    let child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "qemu-system-x86_64"])
        .args(arguments(machine))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("the lab's machine does not start; scripts/setup.sh installs QEMU and setpriv")?;
    let mut child = Killed(child);
    let console = child.0.stdout.take().context("the lab's machine has no console")?;
    let copier = thread::spawn(move || copy_console(console, &mut io::stdout()));
    let begun = Instant::now();
    let ended = loop {
        match child.0.try_wait()? {
            Some(status) if status.success() => break Ended::PoweredOff,
            Some(status) => {
                let words = fs::read_to_string(machine.logs.join(QEMU_LOG)).unwrap_or_default();
                bail!("the lab's machine ended with {status}: {}", words.trim_end());
            }
            None if begun.elapsed() > machine.limit => break Ended::TimedOut,
            None => thread::sleep(STEP),
        }
    };
    drop(child);
    let _ = copier.join();
    Ok(ended)
}

fn arguments(machine: &Machine) -> Vec<String> {
    let parts = machine.parts;
    let mut args: Vec<String> = ["-machine", "q35,usb=off", "-cpu", "max,+svm"].map(str::to_owned).to_vec();
    let mut option = |name: &str, value: String| args.extend([name.to_owned(), value]);
    // Processors take turns on one thread. On threads of their own one was seen to stop at a breakpoint that another had taken
    // away already, in kernels that patch themselves: of the lab, and of guests in it.
    option("-accel", format!("tcg,thread=single,tb-size={TRANSLATED_MIB}"));
    option("-smp", machine.cpus.to_string());
    option("-m", machine.memory_mib.to_string());
    option("-kernel", parts.kernel.bzimage.display().to_string());
    option("-initrd", parts.initrd.display().to_string());
    option("-append", COMMAND_LINE.to_owned());
    let disks = [(parts.rootfs.raw.as_path(), ",snapshot=on"), (machine.work, ""), (machine.store, "")];
    for (place, (path, mode)) in disks.into_iter().enumerate() {
        // A comma in a path is written twice.
        let file = path.display().to_string().replace(',', ",,");
        option(
            "-drive",
            format!("if=none,id=d{place},format=raw,cache=unsafe,discard=unmap,file={file}{mode}"),
        );
        option("-device", format!("virtio-blk-pci,drive=d{place}"));
    }
    option("-device", "virtio-rng-pci".to_owned());
    let log = machine.logs.join(KERNEL_LOG).display().to_string().replace(',', ",,");
    option("-serial", format!("file:{log}"));
    option("-chardev", "stdio,id=console,signal=off".to_owned());
    option("-device", "virtio-serial-pci".to_owned());
    option("-device", "virtconsole,chardev=console".to_owned());
    option("-display", "none".to_owned());
    args.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    args
}

fn copy_console(mut console: impl Read, out: &mut impl Write) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = console.read(&mut buffer) {
        if out.write_all(&buffer[..count]).and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

/// A process that does not outlive its owner.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
