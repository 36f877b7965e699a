//! Keeping disk chains short.
//!
//! Every freeze adds a layer, and a read of a cluster that no layer has searches all of them. Above
//! [`FEW`] layers a machine copies, in the background and at a bounded rate, what its lower
//! overlays hold into its own writable top (QEMU's `block-stream`); when that is done its chain is
//! the raw bottom and the top. Nothing immutable is written, and relatives do not notice; the price
//! is that the copied clusters are no longer shared. A copy cut short by a freeze, an end or a
//! crash leaves a top that is correct, only larger. A freeze waits for it only when the chain would
//! reach [`MANY`].
//!
//! A finished copy stays listed in the monitor until the record is updated, so a crash of the node
//! loses nothing.

use super::{
    args::BOTTOM_NODE,
    running::{QemuVm, Record},
};
use crate::{EngineError, Result, fsutil::remove_file, layers::layer_path, process::blocking};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Above this many layers a machine shortens its chain.
const FEW: usize = 8;
/// From this many layers upwards a freeze waits until the chain has been shortened.
const MANY: usize = 32;
/// Bytes a second.
const RATE: u64 = 256 << 20;
const JOB: &str = "shorten";
/// How long a copy that is waited for may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long a cancelled one may.
const CANCEL: Duration = Duration::from_secs(30);

/// Starts to shorten the chain if it is long. On an error the next call tries again.
pub(super) async fn shorten(vm: &QemuVm, record: &Record) {
    if record.layers.len() <= FEW {
        return;
    }
    let arguments = json!({"job-id": JOB, "device": record.engine.top_node, "base-node": BOTTOM_NODE, "backing-file": "",
        "speed": RATE, "on-error": "report", "auto-dismiss": false});
    if let Err(error) = vm.backend.monitor.qmp.run("block-stream", arguments).await {
        tracing::warn!(dir = %vm.paths.dir.display(), %error, "the disk chain stays long");
    }
}

/// Ends a copy that runs (waits for it if the chain is very long) and brings the record up to date.
pub(super) async fn wait_short_enough(vm: &QemuVm, record: &mut Record) -> Result<()> {
    if record.layers.len() <= FEW {
        return Ok(());
    }
    let qmp = &vm.backend.monitor.qmp;
    let patience = if record.layers.len() < MANY {
        if job(vm).await? == Job::Runs {
            // It may have ended since.
            let _ = qmp.run("block-job-cancel", json!({"device": JOB})).await;
        }
        CANCEL
    } else {
        if job(vm).await? == Job::None {
            shorten(vm, record).await;
        }
        PATIENCE
    };
    let started = Instant::now();
    while job(vm).await? == Job::Runs {
        if started.elapsed() > patience {
            return Err(EngineError::Monitor("does not finish shortening its disk".into()));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    follow(vm, record).await
}

/// Makes the record name the layers that QEMU has after a copy has ended, and removes those that it no longer reads. The ended job waits in the monitor until this has been done, also over a restart of
/// the node, and no freeze comes between: what it copied is every layer that the record names above the bottom.
pub(super) async fn follow(vm: &QemuVm, record: &mut Record) -> Result<()> {
    match job(vm).await? {
        Job::Ended { copied: true } => {
            let dropped = record.layers.split_off(1.min(record.layers.len()));
            record.save(&vm.paths)?;
            let dir = vm.paths.dir.clone();
            blocking(move || {
                dropped.iter().try_for_each(|layer| remove_file(&layer_path(&dir, &layer.name)))
            })
            .await?;
        }
        Job::Ended { copied: false } => {}
        Job::Runs | Job::None => return Ok(()),
    }
    vm.backend.monitor.qmp.run("job-dismiss", json!({"id": JOB})).await?;
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Job {
    None,
    Runs,
    Ended { copied: bool },
}

async fn job(vm: &QemuVm) -> Result<Job> {
    Ok(find_job(&vm.backend.monitor.qmp.run("query-jobs", json!({})).await?))
}

fn find_job(jobs: &Value) -> Job {
    let ours = |job: &&Value| job.get("id").and_then(Value::as_str) == Some(JOB);
    match jobs.as_array().and_then(|jobs| jobs.iter().find(ours)) {
        None => Job::None,
        Some(job) if job.get("status").and_then(Value::as_str) == Some("concluded") => {
            Job::Ended { copied: job.get("error").is_none() }
        }
        Some(_) => Job::Runs,
    }
}

#[cfg(test)]
mod tests {
    use super::{Job, find_job};
    use serde_json::json;

    #[test]
    fn a_job_counts_as_done_only_when_it_ended_without_an_error() {
        let jobs =
            |status: &str| json!([{"id": "other", "status": "running"}, {"id": "shorten", "status": status}]);
        assert_eq!(find_job(&json!([])), Job::None);
        assert_eq!(find_job(&jobs("running")), Job::Runs);
        assert_eq!(find_job(&jobs("aborting")), Job::Runs);
        assert_eq!(find_job(&jobs("concluded")), Job::Ended { copied: true });
        let failed = json!([{"id": "shorten", "status": "concluded", "error": "Operation canceled"}]);
        assert_eq!(find_job(&failed), Job::Ended { copied: false });
    }
}
