//! Finding a machine again after the daemon was restarted.
//!
//! Whatever the daemon was doing when it died, the record says what to do: a prepared VM is ended, a freeze that
//! had switched the disk is completed as far as the machine goes, one that had not is forgotten, and a
//! machine that its user did not park runs.

use super::{
    Host,
    args::{DISK, mark},
    freeze::{abandon, node_name, promote},
    machine::{QemuMachine, assemble},
    process::Monitor,
};
use crate::{
    EngineError, Result, VmPaths,
    record::{self, Record},
};
use keiki_sys::process::Process;
use serde_json::{Value, json};
use std::sync::Arc;

/// The machine with these paths, if it lives.
pub(super) async fn adopt(host: &Arc<Host>, paths: &VmPaths) -> Result<Option<QemuMachine>> {
    let Some(record) = Record::load(paths) else {
        end_strays(paths)?;
        record::clear(paths)?;
        return Ok(None);
    };
    let process = Process::open(record.pid).map_err(EngineError::at("open", &paths.dir))?;
    let Some(process) = process.filter(|process| process.start_time() == record.start_time) else {
        record::clear(paths)?;
        return Ok(None);
    };
    let process = Arc::new(process);
    let adopted = match record.waiting {
        true => Err(EngineError::Monitor("was only prepared".into())),
        false => attach(host, Arc::clone(&process), paths, record).await,
    };
    match adopted {
        Ok(machine) => Ok(Some(machine)),
        Err(error) => {
            tracing::warn!(dir = %paths.dir.display(), %error, "a monitor was found and ended");
            process.kill().map_err(EngineError::at("end", &paths.dir))?;
            while process.try_reap().is_none() {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
            record::clear(paths)?;
            Ok(None)
        }
    }
}

/// Ends monitors that were started with these paths and never recorded: the daemon died in between. They
/// are known by the name in their command line.
fn end_strays(paths: &VmPaths) -> Result<()> {
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
            tracing::warn!(pid, dir = %paths.dir.display(), "a monitor that was never recorded is ended");
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
) -> Result<QemuMachine> {
    let user = record.user.map(|id| host.users.claim(id));
    let monitor = Monitor::attach(process, paths, None, user).await?;
    let machine = assemble(host, monitor, paths, record).await.map_err(|(_, error)| error)?;
    let qmp = &machine.0.monitor.qmp;
    let mut record = machine.0.record.lock().await;
    if let Some(next) = record.next_top.clone() {
        let node = node_name(&next);
        if disk_node(&qmp.run("query-block", json!({})).await?) == Some(node.as_str()) {
            promote(&mut record, &node);
            record.save(paths)?;
        } else {
            abandon(&machine.0, &mut record).await;
        }
    }
    super::chain::follow(&machine.0, &mut record).await?;
    qmp.run(if record.paused { "stop" } else { "cont" }, json!({})).await?;
    drop(record);
    Ok(machine)
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
