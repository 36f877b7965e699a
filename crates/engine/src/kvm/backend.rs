//! What [`crate::Machine`] needs from this engine.

use super::{
    control::Control,
    freeze,
    host::Host,
    monitor::{self, Monitor},
    running::{KvmBackend, KvmPart, KvmVm, Record, assemble, reconcile},
};
use crate::{
    EngineError, FreezeReport, Frozen, Image, Result, VmPaths, machine::Backend, process::Watched,
    record::CONTROL,
};
use keiki_control::Request;
use keiki_sys::{host::kib, process::Process};
use keiki_types::api::MemoryUse;
use std::{
    fs,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
};

impl Backend for KvmBackend {
    type Host = Host;
    type Part = KvmPart;

    fn watched(&self) -> &Watched {
        &self.monitor.watched
    }

    fn exit_reason(&self, paths: &VmPaths) -> Option<String> {
        self.monitor.exit_reason(paths)
    }

    async fn kill(&self) -> Result<()> {
        let first_run = self.first_run.lock().take();
        if let Some(first_run) = first_run {
            first_run.ends().await;
        }
        self.monitor.watched.kill().await?;
        self.shortening.stopped.store(true, Ordering::Release);
        // Work on the disk chain has ended once the permit is free.
        drop(self.shortening.permit.lock().await);
        Ok(())
    }

    async fn set_paused(&self, paused: bool) -> Result<()> {
        let request = if paused { Request::Pause } else { Request::Resume };
        self.monitor.control.order(request, Vec::new()).await
    }

    async fn freeze(
        vm: &Arc<KvmVm>,
        record: &mut Record,
        image: &Image,
    ) -> Result<(Arc<dyn Frozen>, FreezeReport)> {
        let (frozen, report) = freeze::freeze(vm, record, image).await?;
        Ok((Arc::new(frozen), report))
    }

    async fn after_failed_freeze(vm: &KvmVm, record: &mut Record) {
        reconcile(vm, record).await;
    }

    /// From the kernel's own sums. They are of the whole monitor, whose own part is small.
    fn memory(vm: &KvmVm) -> Result<MemoryUse> {
        let path = PathBuf::from(format!("/proc/{}/smaps_rollup", vm.backend.monitor.pid()));
        let text = fs::read_to_string(&path).map_err(EngineError::at("read", &path))?;
        let value = |key| kib(&text, key).unwrap_or(0);
        Ok(MemoryUse {
            guest_bytes: u64::from(vm.shape.memory_mib) << 20,
            rss_bytes: value("Rss"),
            pss_bytes: value("Pss"),
            private_bytes: value("Private_Clean") + value("Private_Dirty"),
            shared_bytes: value("Shared_Clean") + value("Shared_Dirty"),
        })
    }

    async fn end_unrecorded(paths: &VmPaths) -> Result<()> {
        monitor::end_unrecorded(paths).await
    }

    /// Blanks and zygotes have ended with the node: their sockets closed. A machine listens at its
    /// control socket.
    async fn attach(
        host: &Arc<Host>,
        process: Arc<Process>,
        paths: &VmPaths,
        record: Record,
    ) -> Result<Arc<KvmVm>> {
        let lineage = host.lineages.find(record.user);
        let mut member = lineage.admit(&paths.dir, record.shape.memory_mib);
        // It is in its group already, if there are any.
        if let Err(error) = member.attach(process.pid()) {
            tracing::warn!(pid = process.pid(), %error, "an adopted machine");
        }
        let monitor = Monitor {
            watched: Watched::new(process, None, || member.ended())?,
            control: Control::at(paths.run_dir.join(CONTROL)),
            lineage,
        };
        assemble(host, monitor.answering(paths).await?, paths, record).await
    }

    async fn reconcile(vm: &KvmVm, record: &mut Record) -> Result<()> {
        reconcile(vm, record).await;
        Ok(())
    }
}
