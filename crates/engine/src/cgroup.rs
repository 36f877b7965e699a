//! A control group for each monitor, where the host has version 2 with the controllers we need.
//!
//! Best effort: a host without them runs monitors without these limits, and [`note`] says so to `doctor`.
//! A group is named after the machine's directory, so that whoever clears the machine up finds it.

use crate::Resources;
use keiki_types::Shape;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

const ROOT: &str = "/sys/fs/cgroup";
/// All of ours.
const OURS: &str = "keiki";
const CONTROLLERS: [&str; 2] = ["memory", "pids"];
/// Beside the guest's RAM: translator's cache, device buffers, layers' tables, the program.
const OVERHEAD: u64 = 512 << 20;
/// Threads of a monitor.
const TASKS: u64 = 512;

/// Puts a monitor into its group. Says on the log what could not be done, once it is not simply absent.
pub(crate) fn confine(resources: &Resources, shape: Shape, pid: u32) {
    if lacking(Path::new(ROOT)).is_some() {
        return;
    }
    if let Err(error) = try_confine(Path::new(ROOT), resources, shape, pid) {
        tracing::warn!(pid, %error, "a monitor runs without memory and task limits");
    }
}

fn try_confine(root: &Path, resources: &Resources, shape: Shape, pid: u32) -> io::Result<()> {
    let group = group(root, resources);
    fs::create_dir_all(&group)?;
    for above in [root, &root.join(OURS)] {
        let enabled = fs::read_to_string(above.join("cgroup.subtree_control")).unwrap_or_default();
        for controller in CONTROLLERS {
            if !enabled.split_whitespace().any(|name| name == controller) {
                fs::write(above.join("cgroup.subtree_control"), format!("+{controller}"))?;
            }
        }
    }
    let memory = (u64::from(shape.memory_mib) << 20).saturating_add(OVERHEAD);
    fs::write(group.join("memory.max"), memory.to_string())?;
    fs::write(group.join("pids.max"), TASKS.to_string())?;
    fs::write(group.join("cgroup.procs"), pid.to_string())
}

/// Removes a monitor's group. It must have ended; a group that is still busy stays, empty, and costs nothing.
pub(crate) fn remove(resources: &Resources) {
    match fs::remove_dir(group(Path::new(ROOT), resources)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::debug!(%error, "a control group stays");
        }
        _ => {}
    }
}

fn group(root: &Path, resources: &Resources) -> PathBuf {
    let digest = blake3::hash(resources.dir.as_os_str().as_encoded_bytes()).to_hex();
    root.join(OURS).join(digest.chars().take(32).collect::<String>())
}

/// What `doctor` says of this host.
pub(crate) fn note() -> String {
    match lacking(Path::new(ROOT)) {
        None => "memory and tasks of each limited by a control group".into(),
        Some(why) => format!("no limit on their memory ({why})"),
    }
}

/// Why there are no groups here. None: there are.
fn lacking(root: &Path) -> Option<String> {
    let Ok(there) = fs::read_to_string(root.join("cgroup.controllers")) else {
        return Some("no cgroup v2".into());
    };
    let missing =
        CONTROLLERS.into_iter().find(|wanted| !there.split_whitespace().any(|name| name == *wanted))?;
    Some(format!("cgroup v2 without its {missing} controller"))
}

#[cfg(test)]
mod tests {
    use super::{group, lacking, try_confine};
    use crate::Resources;
    use keiki_types::Shape;
    use std::fs;

    #[test]
    fn limits_are_written_where_there_are_controllers() -> std::io::Result<()> {
        let root = tempfile::tempdir()?;
        let resources = Resources { dir: "/store/m".into(), run_dir: "/run/m".into(), netns: None };
        assert_eq!(lacking(root.path()).as_deref(), Some("no cgroup v2"));
        fs::write(root.path().join("cgroup.controllers"), "cpu memory\n")?;
        assert_eq!(lacking(root.path()).as_deref(), Some("cgroup v2 without its pids controller"));
        fs::write(root.path().join("cgroup.controllers"), "cpu memory pids\n")?;
        assert_eq!(lacking(root.path()), None);
        fs::write(root.path().join("cgroup.subtree_control"), "memory pids\n")?;
        try_confine(root.path(), &resources, Shape { vcpus: 1, memory_mib: 512, disk_mib: 1 }, 77)?;
        let group = group(root.path(), &resources);
        let read = |name: &str| fs::read_to_string(group.join(name));
        assert_eq!((read("memory.max")?, read("pids.max")?), ((1_u64 << 30).to_string(), "512".into()));
        assert_eq!(read("cgroup.procs")?, "77");
        Ok(())
    }
}
