//! Programs the node uses.

use super::check::Check;
use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

pub(super) fn checks() -> Vec<Check> {
    vec![qemu(), tools()]
}

/// Finds a program, also in the sbin directories, which a user's PATH often lacks.
pub(super) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let runs = |path: &Path| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    dirs.map(|dir| dir.join(name)).find(|path| runs(path))
}

/// Standard output of a program, if it succeeds.
pub(super) fn output(program: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// `QEMU emulator version 10.0.2 (Debian ...)` as ("10.0.2", 10).
fn qemu_version(text: &str) -> Option<(&str, u32)> {
    let version = text.split("version ").nth(1)?.split([' ', '\n', '(']).next()?;
    Some((version, version.split('.').next()?.parse().ok()?))
}

fn qemu() -> Check {
    let (name, remedy) = ("qemu", "apt-get install --no-install-recommends qemu-system-x86 qemu-utils");
    let Some(path) = find("qemu-system-x86_64") else {
        return Check::fail(name, "qemu-system-x86_64 is not installed", remedy);
    };
    let text = output(&path, &["--version"]).unwrap_or_default();
    match qemu_version(&text) {
        Some((version, major)) if major >= 7 => Check::ok(name, format!("version {version}")),
        Some((version, _)) => {
            Check::fail(name, format!("version {version} is too old"), "use QEMU 7.2 or newer")
        }
        None => Check::fail(name, format!("cannot run {}", path.display()), remedy),
    }
}

fn tools() -> Check {
    let name = "template tools";
    // Program and Debian package.
    let wanted = [
        ("mmdebstrap", "mmdebstrap"),
        ("dpkg-deb", "dpkg"),
        ("apt-get", "apt"),
        ("mke2fs", "e2fsprogs"),
        ("qemu-img", "qemu-utils"),
        ("mkfs.xfs", "xfsprogs"),
        ("losetup", "mount"),
        ("depmod", "kmod"),
        ("xz", "xz-utils"),
    ];
    let missing: Vec<_> = wanted.into_iter().filter(|(program, _)| find(program).is_none()).collect();
    if missing.is_empty() {
        return Check::ok(name, wanted.map(|(program, _)| program).join(", "));
    }
    let programs: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
    let packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    let remedy = format!("apt-get install --no-install-recommends {}", packages.join(" "));
    Check::fail(name, format!("missing: {}", programs.join(", ")), remedy)
}

#[cfg(test)]
mod tests {
    use super::{find, qemu_version};

    #[test]
    fn versions_are_read() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright";
        assert_eq!(qemu_version(text), Some(("10.0.2", 10)));
        assert_eq!(qemu_version("QEMU emulator version 7.2.9\n"), Some(("7.2.9", 7)));
        assert_eq!(qemu_version("no"), None);
    }

    #[test]
    fn programs_are_found_by_name() {
        assert!(find("sh").is_some());
        assert!(find("keiki-has-no-such-program").is_none());
    }
}
