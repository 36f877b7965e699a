//! The data directory: reflinks and free space.

use super::{check::Check, programs::find};
use crate::text::bytes;
use std::path::Path;

const GIB: u64 = 1 << 30;

pub(super) fn checks(data_dir: &Path) -> Vec<Check> {
    // The directory may not exist yet; its nearest ancestor is on the same file system.
    let there = data_dir.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    vec![reflinks(there), room(there)]
}

fn reflinks(dir: &Path) -> Check {
    let name = "reflinks";
    match keiki_sys::files::has_reflinks(dir) {
        Ok(true) => Check::ok(name, format!("supported at {}", dir.display())),
        Ok(false) if find("mkfs.xfs").is_some() && find("losetup").is_some() => Check::ok(
            name,
            format!("not supported at {}: the node creates an XFS image there", dir.display()),
        ),
        Ok(false) => Check::fail(
            name,
            format!("not supported at {}, and the node cannot create an XFS image", dir.display()),
            "apt-get install --no-install-recommends xfsprogs mount, or use XFS or btrfs",
        ),
        Err(error) => {
            let detail = format!("cannot test {}: {error}", dir.display());
            Check::warn(name, detail, "run as root, or choose another --data-dir")
        }
    }
}

fn room(dir: &Path) -> Check {
    let (name, remedy) = ("disk space", "free some space, or choose another --data-dir");
    let Ok(stat) = rustix::fs::statvfs(dir) else {
        return Check::warn(name, format!("unknown at {}", dir.display()), remedy);
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let detail = format!("{} free at {}", bytes(free), dir.display());
    match free {
        _ if free < 4 * GIB => Check::fail(name, format!("{detail}; the first template needs 4 GiB"), remedy),
        _ if free < 10 * GIB => Check::warn(name, detail, "have 10 GiB or more for snapshots"),
        _ => Check::ok(name, detail),
    }
}

#[cfg(test)]
mod tests {
    use super::checks;
    use crate::doctor::check::Verdict;

    #[test]
    fn a_missing_directory_is_judged_by_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let checks = checks(&dir.path().join("not/yet"));
        assert_eq!(checks.len(), 2);
        assert!(checks[1].detail.contains(&dir.path().display().to_string()), "{}", checks[1].detail);
        assert!(checks[0].ok != Verdict::Warn, "{:?}", checks[0]);
    }
}
