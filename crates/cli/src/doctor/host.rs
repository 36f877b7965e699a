//! Kernel, privileges, KVM, namespaces.

use super::check::{Check, read};
use crate::config::{VMM, find};
use std::{fs::OpenOptions, io};

pub(super) fn checks() -> Vec<Check> {
    vec![root(), kernel(), kvm(), namespaces(), landlock()]
}

fn root() -> Check {
    if rustix::process::geteuid().is_root() {
        Check::ok("root", "running as root")
    } else {
        let remedy =
            "run `keiki node` (and this check) as root: it creates namespaces, mounts and firewall rules";
        Check::fail("root", "not running as root", remedy)
    }
}

/// `6.18.5-foo` as (6, 18).
fn release(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel() -> Check {
    let name = "kernel";
    let uname = rustix::system::uname();
    let text = uname.release().to_string_lossy().into_owned();
    match release(&text) {
        Some(version) if version >= (6, 7) => Check::ok(name, format!("Linux {text}, with PAGEMAP_SCAN")),
        Some(version) if version >= (5, 10) => {
            let detail = format!("Linux {text} has no PAGEMAP_SCAN: finding dirty pages is slower");
            Check::warn(
                name,
                detail,
                "use Linux 6.7 or newer, for faster forks (Debian 12: linux-image-amd64 from backports)",
            )
        }
        Some(_) => Check::fail(
            name,
            format!("Linux {text} is too old"),
            "use Linux 5.10 or newer, preferably 6.7 or newer",
        ),
        None => Check::warn(name, format!("Linux {text}: unknown version"), "use Linux 6.7 or newer"),
    }
}

fn kvm() -> Check {
    let name = "/dev/kvm";
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => match std::env::current_exe().ok().and_then(|exe| find(&exe, VMM).ok()) {
            Some(vmm) => speed(keiki_node::kvm_check(&vmm)),
            None => Check::warn(
                name,
                "works, but keiki-vmm is not installed: sandboxes run in software emulation",
                "install keiki-vmm next to keiki or in ../lib/keiki",
            ),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Check::warn(
            name,
            "not found: sandboxes run in software emulation, several times slower",
            "load kvm_intel or kvm_amd, or enable (nested) virtualization for this machine",
        ),
        Err(error) => {
            let remedy = "run as root or as a member of group kvm";
            Check::warn(
                name,
                format!("cannot open it ({error}): sandboxes run in software emulation"),
                remedy,
            )
        }
    }
}

fn speed((native, detail): (bool, String)) -> Check {
    match native {
        true => Check::ok("/dev/kvm", detail),
        false => Check::warn(
            "/dev/kvm",
            format!("{detail}; sandboxes run in software emulation"),
            "use a machine with (nested) hardware virtualization for much faster forks and snapshots",
        ),
    }
}

fn namespaces() -> Check {
    let name = "namespaces";
    let missing: Vec<&str> = ["net", "mnt", "pid"]
        .into_iter()
        .filter(|kind| !std::path::Path::new("/proc/self/ns").join(kind).exists())
        .collect();
    if !missing.is_empty() {
        let detail = format!("the kernel lacks {}", missing.join(", "));
        return Check::fail(
            name,
            detail,
            "use a kernel with CONFIG_NET_NS, CONFIG_PID_NS and mount namespaces",
        );
    }
    match read("/proc/sys/user/max_net_namespaces").and_then(|text| text.parse::<u64>().ok()) {
        Some(limit) if limit < 64 => {
            let remedy = "sysctl -w user.max_net_namespaces=16384";
            Check::fail(name, format!("at most {limit} network namespaces are allowed"), remedy)
        }
        Some(limit) => Check::ok(name, format!("network, mount, PID; up to {limit} network namespaces")),
        None => Check::ok(name, "network, mount, PID"),
    }
}

fn landlock() -> Check {
    let name = "landlock";
    match read("/sys/kernel/security/lsm") {
        Some(modules) if modules.split(',').any(|module| module == "landlock") => Check::ok(name, "on"),
        Some(_) => Check::warn(
            name,
            "off: monitors are confined by other means only",
            "add landlock to the lsm= kernel parameter",
        ),
        None => Check::warn(
            name,
            "unknown: securityfs is not mounted",
            "mount -t securityfs securityfs /sys/kernel/security",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::{release, speed};
    use crate::doctor::check::Verdict;

    #[test]
    fn releases() {
        assert_eq!(release("6.18.5-cloud"), Some((6, 18)));
        assert_eq!(release("5.10.0"), Some((5, 10)));
        assert_eq!(release("6.1+deb"), Some((6, 1)));
        assert_eq!(release("x"), None);
    }

    #[test]
    fn slow_kvm_is_not_a_failure() {
        assert_eq!(speed((true, "fast".into())).ok, Verdict::Ok);
        let slow = speed((false, "slow".into()));
        assert_eq!(slow.ok, Verdict::Warn);
        assert!(slow.detail.contains("software emulation"));
    }
}
