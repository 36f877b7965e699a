//! What [`crate::Machine`] needs from this engine.

use super::{
    args::{DISK, mark},
    chain, freeze,
    host::Host,
    monitor::Monitor,
    ram_copy,
    running::{QemuBackend, QemuPart, QemuVm, Record, assemble},
};
use crate::{EngineError, FreezeReport, Frozen, Image, Result, VmPaths, machine::Backend, process::Watched};
use keiki_snapshot::MEMORY_FILE;
use keiki_sys::process::Process;
use keiki_types::api::MemoryUse;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How long the end of a guest's console output is waited for.
const CONSOLE: Duration = Duration::from_secs(1);

impl Backend for QemuBackend {
    type Host = Host;
    type Part = QemuPart;

    fn watched(&self) -> &Watched {
        &self.monitor.watched
    }

    fn exit_reason(&self, _: &VmPaths) -> Option<String> {
        self.monitor.has_ended()
    }

    async fn kill(&self) -> Result<()> {
        self.monitor.kill().await
    }

    async fn set_paused(&self, paused: bool) -> Result<()> {
        self.monitor.qmp.run(if paused { "stop" } else { "cont" }, json!({})).await.map(drop)
    }

    async fn freeze(
        vm: &Arc<QemuVm>,
        record: &mut Record,
        image: &Image,
    ) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let (frozen, report) = freeze::freeze(vm, record, image).await?;
        Ok((Arc::new(frozen), report))
    }

    async fn after_failed_freeze(vm: &QemuVm, record: &mut Record) {
        freeze::abandon(vm, record).await;
    }

    /// The end of the output is still in the socket.
    async fn console_complete(&self) {
        let waited = Instant::now();
        while !self.console.0.is_finished() && waited.elapsed() < CONSOLE {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn memory(vm: &QemuVm) -> Result<MemoryUse> {
        let guest = u64::from(vm.shape.memory_mib) << 20;
        let image = vm.paths.dir.join(MEMORY_FILE);
        ram_copy::memory_use(vm.backend.monitor.process().pid(), &image, guest)
    }

    /// Known by the mark in their command lines.
    async fn end_unrecorded(paths: &VmPaths) -> Result<()> {
        let mark = mark(paths);
        let failed = || EngineError::at("end a monitor of", &paths.dir);
        for entry in std::fs::read_dir("/proc").map_err(failed())? {
            let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse().ok()) else {
                continue;
            };
            let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
            if !String::from_utf8_lossy(&line).contains(&mark) {
                continue;
            }
            if let Some(process) = Process::open(pid).map_err(failed())? {
                tracing::warn!(pid, dir = %paths.dir.display(), "ending a monitor that was never recorded");
                process.kill().map_err(failed())?;
            }
        }
        Ok(())
    }

    async fn attach(
        host: &Arc<Host>,
        process: Arc<Process>,
        paths: &VmPaths,
        record: Record,
    ) -> Result<Arc<QemuVm>> {
        let user = record.user.map(|id| host.users.claim(id));
        let monitor = Monitor::attach(process, paths, None, user).await?;
        assemble(host, monitor, paths, record).await.map_err(|(_, error)| error)
    }

    async fn reconcile(vm: &QemuVm, record: &mut Record) -> Result<()> {
        if let Some(next) = record.next_top.clone() {
            let node = freeze::node_name(&next);
            let blocks = vm.backend.monitor.qmp.run("query-block", json!({})).await?;
            if disk_node(&blocks) == Some(node.as_str()) {
                freeze::promote(record, &node);
                record.save(&vm.paths)?;
            } else {
                freeze::abandon(vm, record).await;
            }
        }
        chain::follow(vm, record).await
    }
}

/// The block node that the disk device writes to.
fn disk_node(answer: &Value) -> Option<&str> {
    let devices = answer.as_array()?;
    let disk = devices.iter().find(|device| {
        device
            .get("qdev")
            .and_then(Value::as_str)
            .is_some_and(|path| path.split('/').any(|part| part == DISK))
    })?;
    disk.pointer("/inserted/node-name")?.as_str()
}
