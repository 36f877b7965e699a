//! Limits on monitors.

use super::check::{Check, read};

pub(super) fn checks() -> Vec<Check> {
    vec![groups(read("/sys/fs/cgroup/cgroup.controllers").as_deref())]
}

fn groups(controllers: Option<&str>) -> Check {
    let name = "cgroup v2";
    let remedy = "boot with systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all, \
                  or mount cgroup2 at /sys/fs/cgroup";
    let Some(controllers) = controllers else {
        return Check::warn(name, "not mounted at /sys/fs/cgroup: monitors have no limits", remedy);
    };
    let has = |wanted: &&str| controllers.split_whitespace().any(|there| there == *wanted);
    let missing: Vec<&str> = ["cpu", "memory", "pids"].into_iter().filter(|wanted| !has(wanted)).collect();
    if missing.is_empty() {
        return Check::ok(name, "cpu, memory and pids limit each monitor");
    }
    let missing = missing.join(", ");
    Check::warn(name, format!("{missing} missing: monitors have no such limits"), remedy)
}

#[cfg(test)]
mod tests {
    use super::groups;
    use crate::doctor::check::Verdict;

    #[test]
    fn all_controllers_are_needed() {
        assert_eq!(groups(Some("cpu memory pids")).ok, Verdict::Ok);
        assert_eq!(groups(Some("cpu memory")).ok, Verdict::Warn);
        assert_eq!(groups(None).ok, Verdict::Warn);
    }
}
