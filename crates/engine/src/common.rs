//! Settings and facts of the host that every engine needs.

use crate::{FIRST_USER, process::blocking};
use std::path::PathBuf;
use tokio::sync::OnceCell;

/// Settings of every engine.
#[derive(Debug, Clone)]
pub struct Common {
    /// `qemu-img`, which makes empty disk layers.
    pub qemu_img: PathBuf,
    /// A directory for the engine alone, on the file system of all machines and snapshots.
    pub store: PathBuf,
    /// First of the [`crate::USERS`] user and group numbers that monitors run as, jailed. None:
    /// monitors run as the user of this process.
    pub first_user: Option<u32>,
}

impl Common {
    /// Programs found by `PATH`; jailed where this process is root.
    #[must_use]
    pub fn new(store: PathBuf) -> Self {
        let first_user = rustix::process::geteuid().is_root().then_some(FIRST_USER);
        Self { qemu_img: "qemu-img".into(), store, first_user }
    }
}

/// Rate of the host's time stamp counter, where known. Measured once.
pub(crate) async fn tsc_khz() -> Option<u64> {
    static RATE: OnceCell<Option<u64>> = OnceCell::const_new();
    let measure = || async { blocking(|| Ok(keiki_sys::tsc::tsc_khz())).await.unwrap_or_default() };
    *RATE.get_or_init(measure).await
}
