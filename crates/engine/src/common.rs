//! What every engine is told.

use crate::FIRST_USER;
use std::path::PathBuf;

/// What every engine is told.
#[derive(Debug, Clone)]
pub struct Common {
    /// `qemu-img`, which makes empty disk layers.
    pub qemu_img: PathBuf,
    /// A directory of the engine's own, on the filesystem of all machines and snapshots.
    pub store: PathBuf,
    /// First of the [`crate::USERS`] user and group numbers that monitors run as, jailed. None: monitors run as this
    /// process does.
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
