//! The machine that runs the benchmark, and usually the node.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    /// Usable cores.
    pub cores: usize,
    pub ram_mib: u64,
    pub kernel: String,
}

impl Machine {
    pub fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: cpu_model(&read("/proc/cpuinfo")).unwrap_or_else(|| std::env::consts::ARCH.into()),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            ram_mib: keiki_sys::host::meminfo("MemTotal").unwrap_or(0) >> 20,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        }
    }
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Machine, cpu_model};

    #[test]
    fn this_machine_is_described() {
        let here = Machine::here();
        assert!(here.cores > 0 && here.ram_mib > 0 && !here.kernel.is_empty() && !here.cpu.is_empty());
        assert_eq!(cpu_model("processor : 0\nmodel name\t: A B: C\n").as_deref(), Some("A B: C"));
        assert_eq!(cpu_model(""), None);
    }
}
