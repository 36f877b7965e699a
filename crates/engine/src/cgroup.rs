//! A control group for each monitor, where the host has version 2 with the controllers we need.
//!
//! Best effort: a host without them runs monitors without these limits, and [`note`] reports that
//! to `doctor`. A group is named after the machine's directory, so that the machine's cleanup finds
//! it.

use crate::{VmPaths, overhead::QEMU_LIMIT};
use keiki_types::Shape;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

const ROOT: &str = "/sys/fs/cgroup";
/// All of ours.
const OURS: &str = "keiki";
const CONTROLLERS: [&str; 2] = ["memory", "pids"];
/// Priority of background work, in `nice` steps. The monitor lowers its own by as much.
const BACKGROUND: i32 = 10;
/// Threads of a monitor.
const TASKS: u64 = 512;

/// Puts a monitor into its group. Logs what fails, unless the host simply has no such groups.
pub(crate) fn confine(paths: &VmPaths, shape: Shape, pid: u32) {
    if lacking(Path::new(ROOT)).is_some() {
        return;
    }
    if let Err(error) = try_confine(Path::new(ROOT), paths, shape, pid) {
        tracing::warn!(pid, %error, "a monitor runs without memory and task limits");
    }
}

fn try_confine(root: &Path, paths: &VmPaths, shape: Shape, pid: u32) -> io::Result<()> {
    let group = group(root, paths);
    fs::create_dir_all(&group)?;
    for above in [root, &root.join(OURS)] {
        enable(above, &CONTROLLERS)?;
    }
    let memory = (u64::from(shape.memory_mib) << 20).saturating_add(QEMU_LIMIT);
    fs::write(group.join("memory.max"), memory.to_string())?;
    fs::write(group.join("pids.max"), TASKS.to_string())?;
    fs::write(group.join("cgroup.procs"), pid.to_string())
}

/// Removes a monitor's group. It must have ended; a group that is still busy stays, empty, and
/// costs nothing.
pub(crate) fn remove(paths: &VmPaths) {
    remove_group(&group(Path::new(ROOT), paths));
}

fn remove_group(group: &Path) {
    match fs::remove_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::debug!(%error, "cannot remove a control group");
        }
        _ => {}
    }
}

fn group(root: &Path, paths: &VmPaths) -> PathBuf {
    root.join(OURS).join(name(&paths.dir))
}

/// Name of the group of the machine with this directory.
pub(crate) fn name(dir: &Path) -> String {
    blake3::hash(dir.as_os_str().as_encoded_bytes()).to_hex().chars().take(32).collect()
}

/// Lets the groups below have limits of these kinds.
fn enable(group: &Path, controllers: &[&str]) -> io::Result<()> {
    let file = group.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&file).unwrap_or_default();
    let missing =
        controllers.iter().filter(|wanted| !enabled.split_whitespace().any(|name| name == **wanted));
    missing.map(|controller| format!("+{controller}")).try_for_each(|word| fs::write(&file, word))
}

/// A group for the memory of relatives, with groups below it that limit everything else.
#[derive(Debug)]
pub(crate) struct LineageGroup(PathBuf);

impl LineageGroup {
    /// The group of the relatives that run as this user. None where the host has no such groups.
    pub(crate) fn make(store: &Path, user: u32) -> Option<Self> {
        Self::make_below(Path::new(ROOT), store, user)
    }

    fn make_below(root: &Path, store: &Path, user: u32) -> Option<Self> {
        if lacking(root).is_some() {
            return None;
        }
        let group = root.join(OURS).join(format!("{}-{user}", name(store)));
        let made = fs::create_dir_all(&group).and_then(|()| {
            enable(root, &CONTROLLERS)?;
            enable(&root.join(OURS), &CONTROLLERS)?;
            // Not memory: it moves between relatives, and is the lineage's. A share of the
            // processors is welcome.
            enable(&group, &["pids"])?;
            for above in [root, &root.join(OURS), &group] {
                if let Err(error) = enable(above, &["cpu"]) {
                    tracing::debug!(%error, "monitors have no processor shares");
                }
            }
            Ok(())
        });
        match made {
            Ok(()) => Some(Self(group)),
            Err(error) => {
                tracing::warn!(user, %error, "monitors run without memory and task limits");
                // It is still empty.
                let _ = fs::remove_dir(&group);
                None
            }
        }
    }

    /// What all relatives together may use. Not less than they use now: the kernel would end one of
    /// them. That is the case while machines are being adopted after a restart, and until an ended
    /// one is completely gone.
    pub(crate) fn limit(&self, bytes: u64) {
        let used = fs::read_to_string(self.0.join("memory.current")).unwrap_or_default();
        if used.trim().parse::<u64>().is_ok_and(|used| used > bytes) {
            return;
        }
        if let Err(error) = fs::write(self.0.join("memory.max"), bytes.to_string()) {
            tracing::warn!(group = %self.0.display(), %error, "cannot set the memory limit of a lineage");
        }
    }

    /// Puts a process into the group of this name. If it stayed in another's group, it would be
    /// killed with that group.
    pub(crate) fn confine(&self, name: &str, pid: u32) -> io::Result<()> {
        let group = self.0.join(name);
        fs::create_dir_all(&group)?;
        fs::write(group.join("pids.max"), TASKS.to_string())?;
        fs::write(group.join("cgroup.procs"), pid.to_string())
    }

    /// Where processors are short, the group of this name comes after the groups of its relatives:
    /// the priority of its processes counts only among themselves. Not last: a caller may be
    /// waiting for the result.
    pub(crate) fn defer(&self, name: &str) {
        if let Err(error) = fs::write(self.0.join(name).join("cpu.weight.nice"), BACKGROUND.to_string()) {
            tracing::debug!(%error, "cannot lower the processor share of background work");
        }
    }

    /// Kills all processes in the group of this name, and removes it.
    pub(crate) fn end(&self, name: &str) -> io::Result<()> {
        let group = self.0.join(name);
        if !group.exists() {
            return Ok(());
        }
        fs::write(group.join("cgroup.kill"), "1")?;
        remove_group(&group);
        Ok(())
    }
}

impl Drop for LineageGroup {
    fn drop(&mut self) {
        // Groups whose last process was still exiting when their machine was cleaned up.
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove_group(&entry.path());
            }
        }
        remove_group(&self.0);
    }
}

/// What `doctor` reports about this host.
pub(crate) fn note() -> String {
    match lacking(Path::new(ROOT)) {
        None => "memory and tasks of each limited by a control group".into(),
        Some(why) => format!("no limit on their memory ({why})"),
    }
}

/// Why there are no groups here. None if there are.
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
    use super::{LineageGroup, group, lacking, try_confine};
    use crate::VmPaths;
    use keiki_types::Shape;
    use std::fs;

    #[test]
    fn limits_are_written_where_there_are_controllers() -> std::io::Result<()> {
        let root = tempfile::tempdir()?;
        let paths = VmPaths { dir: "/store/m".into(), run_dir: "/run/m".into(), netns: None };
        assert_eq!(lacking(root.path()).as_deref(), Some("no cgroup v2"));
        fs::write(root.path().join("cgroup.controllers"), "cpu memory\n")?;
        assert_eq!(lacking(root.path()).as_deref(), Some("cgroup v2 without its pids controller"));
        fs::write(root.path().join("cgroup.controllers"), "cpu memory pids\n")?;
        assert_eq!(lacking(root.path()), None);
        fs::write(root.path().join("cgroup.subtree_control"), "memory pids\n")?;
        try_confine(root.path(), &paths, Shape { vcpus: 1, memory_mib: 512, disk_mib: 1 }, 77)?;
        let group = group(root.path(), &paths);
        let read = |name: &str| fs::read_to_string(group.join(name));
        assert_eq!((read("memory.max")?, read("pids.max")?), ((1_u64 << 30).to_string(), "512".into()));
        assert_eq!(read("cgroup.procs")?, "77");
        Ok(())
    }

    #[test]
    fn memory_is_limited_for_relatives_together_and_tasks_for_each() -> std::io::Result<()> {
        let root = tempfile::tempdir()?;
        let make = || LineageGroup::make_below(root.path(), "/store".as_ref(), 7);
        assert!(make().is_none());
        fs::write(root.path().join("cgroup.controllers"), "cpu memory pids\n")?;
        let group = make().ok_or_else(|| std::io::Error::other("no group"))?;
        group.limit(1 << 30);
        group.confine("one", 77)?;
        let read = |name: &str| fs::read_to_string(group.0.join(name));
        assert_eq!(read("memory.max")?, (1_u64 << 30).to_string());
        assert_eq!((read("one/pids.max")?, read("one/cgroup.procs")?), ("512".into(), "77".into()));
        assert!(!read("cgroup.subtree_control")?.contains("memory"));
        assert!(fs::read_to_string(root.path().join("keiki/cgroup.subtree_control")).is_ok());
        group.end("none")?;
        group.end("one")?;
        assert_eq!(read("one/cgroup.kill")?, "1");
        Ok(())
    }
}
