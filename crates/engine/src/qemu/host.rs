//! What all machines of the engine share.

use super::args::machine_digest;
use crate::{Common, EngineError, Result, process::blocking, users::Users};
use keiki_snapshot::Made;
use keiki_types::{EngineKind, Shape};
use std::{path::PathBuf, process::Command};
use tokio::sync::OnceCell;

/// Settings of the engine.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// `qemu-system-x86_64`.
    pub binary: PathBuf,
    /// Settings of every engine.
    pub common: Common,
}

impl QemuConfig {
    /// The program found by `PATH`.
    #[must_use]
    pub fn new(store: PathBuf) -> Self {
        Self { binary: "qemu-system-x86_64".into(), common: Common::new(store) }
    }
}

/// What all machines of the engine share.
pub(super) struct Host {
    pub(super) config: QemuConfig,
    pub(super) users: Users,
    version: OnceCell<String>,
}

impl Host {
    pub(super) fn new(config: QemuConfig) -> Self {
        Self { config, users: Users::default(), version: OnceCell::new() }
    }

    /// QEMU's version, as it prints it. Asked once.
    pub(super) async fn version(&self) -> Result<&str> {
        let ask = || async {
            let binary = self.config.binary.clone();
            blocking(move || {
                let output = Command::new(&binary).arg("--version").output();
                let output = output.map_err(EngineError::at("run", &binary))?;
                let text = String::from_utf8_lossy(&output.stdout);
                let first = text.lines().next().unwrap_or_default();
                match first.strip_prefix("QEMU emulator version ") {
                    Some(version) => Ok(version.chars().take(100).collect()),
                    None => Err(EngineError::Monitor("does not print its version".into())),
                }
            })
            .await
        };
        self.version.get_or_try_init(ask).await.map(String::as_str)
    }
}

/// What a snapshot made here records about its engine.
pub(super) fn made(version: &str, shape: Shape) -> Made {
    Made { engine: EngineKind::Qemu, version: version.to_owned(), machine: machine_digest(shape) }
}
