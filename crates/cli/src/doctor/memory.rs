//! RAM and overcommit.

use super::check::{Check, read};
use crate::text::bytes;
use keiki_sys::host::meminfo;

const MIB: u64 = 1 << 20;

pub(super) fn checks() -> Vec<Check> {
    vec![overcommit(read("/proc/sys/vm/overcommit_memory").as_deref()), ram()]
}

fn overcommit(mode: Option<&str>) -> Check {
    let name = "overcommit";
    match mode {
        Some("2") => Check::fail(
            name,
            "vm.overcommit_memory=2: the kernel reserves all the RAM of every fork, and forks fail",
            "sysctl -w vm.overcommit_memory=0 (and in /etc/sysctl.d to keep it)",
        ),
        Some(mode) => Check::ok(name, format!("vm.overcommit_memory={mode}")),
        None => Check::warn(name, "cannot read vm.overcommit_memory", "mount /proc"),
    }
}

fn ram() -> Check {
    let (name, remedy) = ("memory", "stop other programs, or use a machine with more RAM");
    let (Some(total), Some(free)) = (meminfo("MemTotal"), meminfo("MemAvailable")) else {
        return Check::warn(name, "cannot read /proc/meminfo", "mount /proc");
    };
    let detail = format!("{} available of {}", bytes(free), bytes(total));
    match free {
        _ if free < 512 * MIB => {
            Check::fail(name, format!("{detail}; a sandbox needs about 512 MiB"), remedy)
        }
        _ if free < 2048 * MIB => Check::warn(name, detail, remedy),
        _ => Check::ok(name, detail),
    }
}

#[cfg(test)]
mod tests {
    use super::overcommit;
    use crate::doctor::check::Verdict;

    #[test]
    fn strict_overcommit_is_a_problem() {
        assert_eq!(overcommit(Some("2")).ok, Verdict::Fail);
        assert_eq!(overcommit(Some("0")).ok, Verdict::Ok);
        assert_eq!(overcommit(Some("1")).ok, Verdict::Ok);
        assert_eq!(overcommit(None).ok, Verdict::Warn);
    }
}
