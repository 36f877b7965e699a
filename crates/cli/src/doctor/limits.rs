//! What holds a monitor that its guest took over.

use super::{Check, read};

pub(super) fn checks() -> Vec<Check> {
    vec![groups(read("/sys/fs/cgroup/cgroup.controllers").as_deref())]
}

fn groups(controllers: Option<&str>) -> Check {
    let name = "control groups";
    let has = |wanted| controllers.unwrap_or_default().split_whitespace().any(|there| there == wanted);
    if has("memory") && has("pids") {
        return Check::ok(name, "each monitor's memory and tasks are limited");
    }
    let detail = match controllers {
        Some(_) => {
            "cgroup v2 lacks its memory or pids controller: monitors have no memory limit of their own"
        }
        None => "no cgroup v2 at /sys/fs/cgroup: monitors have no memory limit of their own",
    };
    Check::warn(name, detail, "boot with systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all")
}

#[cfg(test)]
mod tests {
    use super::groups;
    use crate::doctor::Verdict;

    #[test]
    fn both_controllers_are_needed() {
        assert_eq!(groups(Some("cpu memory pids")).ok, Verdict::Ok);
        assert_eq!(groups(Some("cpu memory")).ok, Verdict::Warn);
        assert_eq!(groups(None).ok, Verdict::Warn);
    }
}
