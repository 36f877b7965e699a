//! Keeping disk chains short.
//!
//! Every freeze adds a layer, and a read that no layer answers asks all of them. Beyond [`FEW`] layers a
//! machine copies, in the background and with a bounded rate, what its lower overlays hold into its own
//! writable top (QEMU's `block-stream`); when that is done its chain is the raw bottom and the top. Nothing
//! immutable is written, and relatives do not notice; the price is that the copied clusters are shared no
//! more. A copy cut short by a freeze, an end or a crash leaves a top that is right, only larger. A freeze
//! waits for it only when the chain would reach [`MANY`].
//!
//! QEMU's own view of the chain is the truth; the record follows it when somebody looks.

use super::{
    args::BOTTOM_NODE,
    disk,
    machine::Running,
    process::{blocking, remove_file},
    record::Record,
};
use crate::{EngineError, Result};
use serde_json::{Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// From here a machine shortens its chain.
pub(super) const FEW: usize = 8;
/// From here a freeze waits until that is done.
const MANY: usize = 32;
/// Bytes a second.
const RATE: u64 = 256 << 20;
const JOB: &str = "shorten";
/// How long a copy that is waited for may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long a cancelled one may.
const CANCEL: Duration = Duration::from_secs(30);

/// Starts to shorten the chain if it is long. Errors are not the caller's: the next one tries again.
pub(super) async fn shorten(machine: &Running, record: &Record) {
    if record.layers.len() <= FEW {
        return;
    }
    let arguments = json!({"job-id": JOB, "device": record.top_node, "base-node": BOTTOM_NODE, "backing-file": "",
        "speed": RATE, "on-error": "report"});
    if let Err(error) = machine.monitor.qmp.run("block-stream", arguments).await {
        tracing::warn!(dir = %machine.resources.dir.display(), %error, "the disk chain stays long");
    }
}

/// Ends a copy that runs (waits for it if the chain is very long) and brings the record up to date.
pub(super) async fn settle(machine: &Running, record: &mut Record) -> Result<()> {
    if record.layers.len() <= FEW {
        return Ok(());
    }
    let qmp = &machine.monitor.qmp;
    let patience = if record.layers.len() < MANY {
        if runs(machine).await? {
            // It may have ended since.
            let _ = qmp.run("block-job-cancel", json!({"device": JOB})).await;
        }
        CANCEL
    } else {
        if !runs(machine).await? {
            shorten(machine, record).await;
        }
        PATIENCE
    };
    let started = Instant::now();
    while runs(machine).await? {
        if started.elapsed() > patience {
            return Err(EngineError::Monitor("does not finish shortening its disk".into()));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    follow(machine, record).await
}

/// Makes the record tell the chain that QEMU has, and removes the names of layers that it no longer reads.
pub(super) async fn follow(machine: &Running, record: &mut Record) -> Result<()> {
    let nodes = machine.monitor.qmp.run("query-named-block-nodes", json!({})).await?;
    let Some(names) = chain(&nodes, &record.top_node) else { return Ok(()) };
    let mut dropped = record.layers.clone();
    dropped.retain(|layer| !names.contains(&layer.name));
    if dropped.is_empty() {
        return Ok(());
    }
    record.layers.retain(|layer| names.contains(&layer.name));
    record.save(&machine.resources)?;
    let dir = machine.resources.dir.clone();
    blocking(move || dropped.iter().try_for_each(|layer| remove_file(&disk::layer_path(&dir, &layer.name))))
        .await
}

async fn runs(machine: &Running) -> Result<bool> {
    let jobs = machine.monitor.qmp.run("query-block-jobs", json!({})).await?;
    Ok(jobs.as_array().is_some_and(|jobs| !jobs.is_empty()))
}

/// File names of a node's image and of everything behind it, top first.
fn chain(nodes: &Value, top: &str) -> Option<Vec<String>> {
    let is_top = |node: &&Value| node.get("node-name").and_then(Value::as_str) == Some(top);
    let mut image = nodes.as_array()?.iter().find(is_top)?.get("image");
    let mut names = Vec::new();
    while let Some(here) = image {
        let path = here.get("filename").and_then(Value::as_str)?;
        names.push(Path::new(path).file_name()?.to_str()?.to_owned());
        image = here.get("backing-image");
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::chain;
    use serde_json::json;

    #[test]
    fn the_chain_is_read_from_the_top_down() {
        let image = json!({"filename": "/x/c.qcow2", "backing-image":
            {"filename": "/x/b.qcow2", "backing-image": {"filename": "/x/a.raw"}}});
        let nodes = json!([{"node-name": "other", "image": {"filename": "/x/z"}}, {"node-name": "top", "image": image}]);
        let names = ["c.qcow2", "b.qcow2", "a.raw"].map(String::from);
        assert_eq!(chain(&nodes, "top"), Some(names.to_vec()));
        assert_eq!(chain(&nodes, "none"), None);
        assert_eq!(chain(&json!({}), "top"), None);
    }
}
