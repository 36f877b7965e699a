//! Host memory behind a machine.

use crate::{EngineError, Result};
use keiki_types::{Shape, api::MemoryUse};

/// From the kernel's own sums. They are of the whole monitor, whose own part is small.
pub(super) fn memory_use(pid: u32, shape: Shape) -> Result<MemoryUse> {
    let path = std::path::PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
    let text = std::fs::read_to_string(&path).map_err(EngineError::at("read", &path))?;
    let value = |key| keiki_sys::host::kib(&text, key).unwrap_or(0);
    Ok(MemoryUse {
        guest_bytes: u64::from(shape.memory_mib) << 20,
        rss_bytes: value("Rss"),
        pss_bytes: value("Pss"),
        private_bytes: value("Private_Clean") + value("Private_Dirty"),
        shared_bytes: value("Shared_Clean") + value("Shared_Dirty"),
    })
}
