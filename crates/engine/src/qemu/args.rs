//! The command line of a monitor.
//!
//! It has two halves. [`machine_args`] is what the guest can see: machine type, processor, devices
//! and their order. It names no path, is the same for a first boot and for every descendant, and
//! its digest goes into each snapshot, because device state only fits the machine that it was taken
//! from. [`command_line`] adds what belongs to one copy: memory, disk, sockets, network.
//!
//! Five choices are not obvious:
//! - RAM is anonymous as far as QEMU knows: `ram` maps the memory image there, including at the
//!   first boot, which has an empty one. So a memory file that a machine runs on is never written,
//!   and there is one way to freeze, not two.
//! - The balloon is there for free page reporting; it is never inflated.
//! - The guest is told the rate of the time stamp counter (`tsc_early_khz`). If it has to measure
//!   the rate on a busy host, it fails, falls back to a loop that needs timer interrupts it does
//!   not get, and never boots.
//! - `tb-size` bounds what a guest can make the translator's cache grow to; the default is 1 GiB.
//! - `werror=report`: by default QEMU parks the machine when the store is full, which looks like a hang.

use crate::{
    BootSpec, VmPaths,
    layers::layer_path,
    record::{AGENT, CONSOLE, QMP},
};
use keiki_protocol::{AGENT_PORT, generation::RESERVED, net::GUEST_MAC};
use keiki_types::Shape;
use serde_json::json;
use std::{
    ffi::OsString,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

/// Block node of the top layer at start.
pub(super) const TOP_NODE: &str = "top";
/// Block node of the raw bottom layer.
pub(super) const BOTTOM_NODE: &str = "layer0";
/// Id of the disk device.
pub(super) const DISK: &str = "disk";

/// The machine's directory as a jailed monitor sees it, below the root.
pub(super) const INSIDE: &str = "m";
/// What a first boot needs, as a jailed monitor sees it.
pub(super) const KERNEL: &str = "kernel";
pub(super) const INITRD: &str = "initrd";

/// The machine's directory as its monitor sees it.
pub(super) fn seen(user: Option<u32>, paths: &VmPaths) -> PathBuf {
    match user {
        Some(_) => Path::new("/").join(INSIDE),
        None => paths.dir.clone(),
    }
}

/// The sockets of one monitor.
#[derive(Debug, Clone)]
pub(super) struct Sockets {
    pub(super) qmp: PathBuf,
    pub(super) agent: PathBuf,
    pub(super) console: PathBuf,
}

impl Sockets {
    pub(super) fn of(paths: &VmPaths) -> Self {
        let at = |name| paths.run_dir.join(name);
        Self { qmp: at(QMP), agent: at(AGENT), console: at(CONSOLE) }
    }
}

/// One start of a monitor.
pub(super) struct Launch<'a> {
    pub(super) shape: Shape,
    pub(super) paths: &'a VmPaths,
    /// The user it runs as, in a jail; none: as we do.
    pub(super) user: Option<u32>,
    /// Name of the empty top layer.
    pub(super) top: &'a str,
    /// A first boot, and the name of the raw layer under its top. Otherwise the monitor waits for a thaw.
    pub(super) boot: Option<(&'a BootSpec, &'a str)>,
    /// Rate of the time stamp counter, where known.
    pub(super) tsc_khz: Option<u64>,
}

/// What a monitor inherits.
pub(super) struct Inherited {
    pub(super) qmp: OwnedFd,
    pub(super) agent: OwnedFd,
    pub(super) console: OwnedFd,
    /// None: no network.
    pub(super) tap: Option<OwnedFd>,
}

/// What the guest can see.
pub(super) fn machine_args(shape: Shape) -> Vec<String> {
    let text = [
        "-machine",
        "microvm,acpi=on,rtc=on,auto-kernel-cmdline=off,memory-backend=ram",
        "-accel",
        "tcg,tb-size=128",
        "-cpu",
        "max",
        "-global",
        "migration.send-configuration=off",
        "-device",
        "virtio-serial-device,id=ports,max_ports=2",
        "-device",
        &format!("virtserialport,bus=ports.0,chardev=agent,name={AGENT_PORT}"),
        "-device",
        &format!("virtio-blk-device,id={DISK},drive={TOP_NODE},werror=report,rerror=report"),
        "-device",
        &format!("virtio-net-device,id=net,netdev=slot,mac={GUEST_MAC}"),
        "-device",
        "virtio-rng-device,id=entropy,rng=random",
        "-device",
        "virtio-balloon-device,id=balloon,free-page-reporting=on",
        "-smp",
        &shape.vcpus.to_string(),
        "-m",
        &format!("{}M", shape.memory_mib),
    ];
    text.map(String::from).into()
}

/// Digest of the above, hex.
pub(super) fn machine_digest(shape: Shape) -> String {
    blake3::hash(machine_args(shape).join("\0").as_bytes()).to_hex().to_string()
}

/// Everything after the program's name.
pub(super) fn command_line(launch: &Launch<'_>, inherited: &Inherited) -> Vec<OsString> {
    let dir = seen(launch.user, launch.paths);
    let mut args: Vec<OsString> = Vec::new();
    let mut add = |list: &[&str]| args.extend(list.iter().map(OsString::from));
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    add(&["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
    let memory = json!({"qom-type": "memory-backend-ram", "id": "ram", "share": false,
        "size": u64::from(launch.shape.memory_mib) << 20});
    add(&["-object", &memory.to_string()]);
    // Asks the kernel: there is no device file in a jail.
    add(&["-object", "rng-builtin,id=random"]);
    add(&["-name", &mark(launch.paths)]);
    let listen = |id, fd: &OwnedFd| format!("socket,id={id},fd={},server=on,wait=off", fd.as_raw_fd());
    add(&[
        "-chardev",
        &listen("agent", &inherited.agent),
        "-chardev",
        &listen("console", &inherited.console),
    ]);
    add(&[
        "-chardev",
        &listen("qmp", &inherited.qmp),
        "-mon",
        "chardev=qmp,mode=control",
        "-serial",
        "chardev:console",
    ]);
    add(&["-netdev", &netdev(inherited)]);
    if let Some((_, disk)) = launch.boot {
        let disk = layer_path(&dir, disk);
        add(&["-blockdev", &super::disk::raw_node(BOTTOM_NODE, &disk).to_string()]);
    }
    let backing = launch.boot.map(|_| BOTTOM_NODE);
    add(&["-blockdev", &super::disk::top_node(TOP_NODE, &layer_path(&dir, launch.top), backing).to_string()]);
    args.extend(machine_args(launch.shape).into_iter().map(OsString::from));
    match launch.boot {
        Some((spec, _)) => {
            let (kernel, initrd) = match launch.user {
                Some(_) => (Path::new("/").join(KERNEL), Path::new("/").join(INITRD)),
                None => (spec.kernel.clone(), spec.initrd.clone()),
            };
            args.extend(["-kernel".into(), kernel.into(), "-initrd".into(), initrd.into()]);
            args.extend(["-append".into(), kernel_cmdline(spec, launch.tsc_khz).into()]);
        }
        None => args.extend(["-S", "-incoming", "defer"].map(OsString::from)),
    }
    args
}

/// What a monitor is known by in the list of processes. The guest does not see it.
pub(super) fn mark(paths: &VmPaths) -> String {
    let text = format!("{} {}", paths.dir.display(), Sockets::of(paths).qmp.display());
    text.replace(',', ",,")
}

fn netdev(inherited: &Inherited) -> String {
    match &inherited.tap {
        Some(tap) => format!("tap,id=slot,fd={}", tap.as_raw_fd()),
        // The guest has the same device, connected to nothing.
        None => "hubport,id=slot,hubid=0".into(),
    }
}

fn kernel_cmdline(spec: &BootSpec, tsc_khz: Option<u64>) -> String {
    let tsc = tsc_khz.map(|khz| format!(" tsc_early_khz={khz}")).unwrap_or_default();
    let quiet = "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check";
    format!("{quiet} {RESERVED}{tsc} {}", spec.cmdline)
}
