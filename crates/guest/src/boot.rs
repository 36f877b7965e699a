//! Boots the system: modules, root disk, mounts, network.
//!
//! The agent starts as `/init` of an initial RAM file system, switches to the root disk and stays
//! the same process. It runs no init system of the sandbox and installs nothing. Only the root disk
//! is required; other failures are logged on the console and skipped.

use crate::{
    log,
    sys::{default_route, interface_up},
};
use keiki_protocol::net::{GATEWAY, GUEST, PREFIX};
use rustix::{
    fs::CWD,
    io::Errno,
    mount::{MountFlags, mount, mount_move},
    net::{AddressFamily, SocketFlags, SocketType, socket_with},
    process::{Resource, Rlimit, chdir, chroot, setrlimit},
};
use std::{
    ffi::CString,
    fs, io,
    os::{fd::AsFd, unix::fs::symlink},
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

const MODULE_LIST: &str = "/keiki/modules";
const MODULE_DIR: &str = "/keiki/modules.d";
const DEFAULT_ROOT: &str = "/dev/vda";
const DISK_WAIT: Duration = Duration::from_secs(20);
const NEW_ROOT: &str = "/keiki/root";

/// Why the system does not boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The root disk never appeared.
    #[error("the root disk {0} did not appear")]
    NoDisk(String),
    /// A required step failed.
    #[error("{0}")]
    Step(&'static str, #[source] io::Error),
}

/// Makes this process the init of the root disk's system.
pub fn boot() -> Result<(), BootError> {
    early_mounts()?;
    load_modules();
    mount_root()?;
    late_mounts();
    limits();
    sysctls();
    network();
    resolver();
    Ok(())
}

/// Logs the error of an optional step.
fn attempt(what: &str, result: Result<(), impl Into<io::Error>>) {
    if let Err(error) = result {
        log::line(&format!("{what}: {}", error.into()));
    }
}

fn early_mounts() -> Result<(), BootError> {
    let secure = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    for (kind, at, flags) in [
        ("devtmpfs", "/dev", MountFlags::NOSUID | MountFlags::NOEXEC),
        ("proc", "/proc", secure),
        ("sysfs", "/sys", secure),
    ] {
        mount_fs(kind, at, flags, "")
            .map_err(|error| BootError::Step("cannot mount the kernel's own", error))?;
    }
    Ok(())
}

/// Mounts a file system without a device. The kernel may have done so itself already.
fn mount_fs(kind: &str, at: &str, flags: MountFlags, options: &str) -> io::Result<()> {
    fs::create_dir_all(at)?;
    let options = CString::new(options)?;
    match mount(kind, at, kind, flags, Some(options.as_c_str())) {
        Err(Errno::BUSY) => Ok(()),
        result => Ok(result?),
    }
}

/// Loads the modules that the image lists, in order. Skips those that are built in or do not fit.
fn load_modules() {
    let Ok(list) = fs::read_to_string(MODULE_LIST) else { return };
    for name in list.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let load = || -> io::Result<()> {
            let file = fs::File::open(Path::new(MODULE_DIR).join(name))?;
            match rustix::system::finit_module(&file, c"", 0) {
                Err(Errno::EXIST) => Ok(()),
                result => Ok(result?),
            }
        };
        attempt(&format!("module {name}"), load());
    }
}

/// The value of `key=` on the kernel's command line.
fn parameter(cmdline: &str, key: &str) -> Option<String> {
    cmdline
        .split_whitespace()
        .rev()
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('=').map(str::to_owned))
}

fn mount_root() -> Result<(), BootError> {
    let step = |what| move |error| BootError::Step(what, error);
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let disk = parameter(&cmdline, "keiki.root").unwrap_or_else(|| DEFAULT_ROOT.to_owned());
    let begin = Instant::now();
    while !Path::new(&disk).exists() {
        if begin.elapsed() > DISK_WAIT {
            return Err(BootError::NoDisk(disk));
        }
        sleep(Duration::from_millis(2));
    }
    fs::create_dir_all(NEW_ROOT).map_err(step("cannot make the mount point"))?;
    mount(disk.as_str(), NEW_ROOT, "ext4", MountFlags::NOATIME, None)
        .map_err(|error| BootError::Step("cannot mount the root disk", error.into()))?;
    for at in ["/dev", "/proc", "/sys"] {
        let target = format!("{NEW_ROOT}{at}");
        fs::create_dir_all(&target).map_err(step("cannot make a mount point on the root disk"))?;
        mount_move(at, target.as_str())
            .map_err(|error| BootError::Step("cannot move a mount to the root disk", error.into()))?;
    }
    // The modules are loaded: free their memory. The agent's own file stays, because it is running.
    attempt("modules", fs::remove_dir_all(MODULE_DIR));
    let switch = || -> rustix::io::Result<()> {
        chdir(NEW_ROOT)?;
        mount_move(".", "/")?;
        chroot(".")?;
        chdir("/")
    };
    switch().map_err(|error| BootError::Step("cannot switch to the root disk", error.into()))
}

fn late_mounts() {
    let nodev = MountFlags::NOSUID | MountFlags::NODEV;
    let secure = nodev | MountFlags::NOEXEC;
    for (kind, at, flags, options) in [
        ("tmpfs", "/run", nodev, "mode=0755"),
        ("tmpfs", "/dev/shm", nodev, "mode=1777"),
        ("devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, "gid=5,mode=0620,ptmxmode=0666"),
        ("cgroup2", "/sys/fs/cgroup", secure, "nsdelegate"),
    ] {
        attempt(&format!("mount {at}"), mount_fs(kind, at, flags, options));
    }
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        // Exists on some kernels.
        let _ = symlink(target, link);
    }
    for (at, mode) in [("/run/lock", 0o1777), ("/run/keiki", 0o755)] {
        let make = || {
            fs::create_dir_all(at)?;
            rustix::fs::chmodat(CWD, at, mode.into(), rustix::fs::AtFlags::empty()).map_err(io::Error::from)
        };
        attempt(at, make());
    }
}

/// Limits that commands inherit. The kernel never kills the first process when memory is short.
fn limits() {
    let files = Rlimit { current: Some(65_536), maximum: Some(1_048_576) };
    attempt("limit of open files", setrlimit(Resource::Nofile, files));
    attempt("limit of core files", setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: None }));
    // Ctrl-Alt-Del becomes a signal to this process, which ignores it.
    attempt("ctrl-alt-del", rustix::system::reboot(rustix::system::RebootCommand::CadOff));
}

fn sysctls() {
    for (name, value) in [
        ("vm/max_map_count", "262144"),
        ("fs/inotify/max_user_watches", "262144"),
        ("fs/inotify/max_user_instances", "1024"),
        ("net/ipv4/ping_group_range", "0 2147483647"),
        ("kernel/printk", "4 4 1 7"),
        // A machine that was frozen for days has no hung tasks.
        ("kernel/hung_task_timeout_secs", "0"),
    ] {
        // Not every kernel has all of these.
        let _ = fs::write(Path::new("/proc/sys").join(name), value);
    }
}

fn network() {
    let configure = || -> io::Result<()> {
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        interface_up(socket.as_fd(), "lo", None)?;
        if !Path::new("/sys/class/net/eth0").exists() {
            log::line("no network device");
            return Ok(());
        }
        // Absent if the kernel has no IPv6.
        let _ = fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1");
        interface_up(socket.as_fd(), "eth0", Some((GUEST, PREFIX)))?;
        default_route(socket.as_fd(), GATEWAY)
    };
    attempt("network", configure());
}

/// Sets the gateway as name server, unless the root disk names its own.
fn resolver() {
    const FILE: &str = "/etc/resolv.conf";
    if fs::read(FILE).is_ok_and(|text| text.iter().any(|byte| !byte.is_ascii_whitespace())) {
        return;
    }
    let write = || {
        if fs::symlink_metadata(FILE).is_ok_and(|meta| meta.is_symlink()) {
            fs::remove_file(FILE)?;
        }
        fs::create_dir_all("/etc")?;
        fs::write(FILE, format!("nameserver {GATEWAY}\n"))
    };
    attempt(FILE, write());
}

#[cfg(test)]
mod tests {
    use super::parameter;

    #[test]
    fn the_last_value_of_a_parameter_counts() {
        let line = "quiet keiki.root=/dev/vdb xkeiki.root=no keiki.rootx=no keiki.root=/dev/vdc\n";
        assert_eq!(parameter(line, "keiki.root").as_deref(), Some("/dev/vdc"));
        assert_eq!(parameter(line, "root"), None);
    }
}
