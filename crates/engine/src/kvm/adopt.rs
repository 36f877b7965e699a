//! Finding a machine again after the daemon was restarted.
//!
//! Blanks and zygotes have ended with the daemon: their sockets closed. A machine listens at its control socket. The
//! record tells the rest: a freeze that had switched the disk is completed as far as the machine goes, one that had
//! not is forgotten, and a machine that its user did not park runs.

use super::{
    Host,
    control::Control,
    freeze::settle,
    frozen::end_stray,
    machine::{KvmMachine, assemble},
    monitor::Monitor,
};
use crate::{
    EngineError, Result, VmPaths,
    process::{Watched, blocking},
    record::{CONTROL, Record},
};
use keiki_control::Request;
use keiki_sys::process::Process;
use std::sync::Arc;

/// The machine with these paths, if it lives.
pub(super) async fn adopt(host: &Arc<Host>, paths: &VmPaths) -> Result<Option<KvmMachine>> {
    let Some(record) = Record::load(paths) else {
        end_stray(paths).await?;
        return clear(paths).await;
    };
    let process = Process::open(record.pid).map_err(EngineError::at("open", &paths.dir))?;
    let Some(process) = process.filter(|process| process.start_time() == record.start_time) else {
        return clear(paths).await;
    };
    match attach(host, process, paths, record).await {
        Ok(machine) => Ok(Some(machine)),
        Err(error) => {
            tracing::warn!(dir = %paths.dir.display(), %error, "a machine was found and ended");
            clear(paths).await
        }
    }
}

async fn clear(paths: &VmPaths) -> Result<Option<KvmMachine>> {
    let paths = paths.clone();
    blocking(move || super::machine::clear(&paths)).await.map(|()| None)
}

/// On error its process has ended.
async fn attach(host: &Arc<Host>, process: Process, paths: &VmPaths, record: Record) -> Result<KvmMachine> {
    let lineage = host.lineages.find(host, record.user);
    let mut member = lineage.admit(&paths.dir, record.shape.memory_mib);
    // It is in its group already, if there are any.
    if let Err(error) = member.born(process.pid()) {
        tracing::warn!(pid = process.pid(), %error, "a machine that was found");
    }
    let monitor = Monitor {
        watched: Watched::new(Arc::new(process), None, || member.ended())?,
        control: Control::at(paths.run_dir.join(CONTROL)),
        lineage,
    };
    let machine = assemble(host, monitor, paths, record).await?;
    let mut record = machine.0.record.lock().await;
    settle(&machine.0, &mut record).await;
    let wish = if record.paused { Request::Pause } else { Request::Resume };
    if let Err(error) = machine.0.monitor.control.order(wish, Vec::new()).await {
        machine.0.monitor.watched.kill().await?;
        return Err(error);
    }
    drop(record);
    Ok(machine)
}
