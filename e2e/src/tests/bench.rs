//! `keiki bench`, as a user runs it.

use crate::{World, within};
use anyhow::{Context, Result, ensure};
use std::{process::Stdio, sync::Arc};
use tokio::process::Command;

/// Few samples, but some of each kind of metric.
const ONLY: &str =
    "create,exec_roundtrip,fork_pause,fork_tax,pss_per_child,private_per_child,model,snapshot,boot";
/// Time limit in seconds.
const LIMIT: u64 = 240;

pub async fn a_quick_run_measures_and_leaves_nothing(world: Arc<World>) -> Result<()> {
    let run = Command::new(world.places.program("keiki"))
        .args(["--url", world.node.client.url(), "-o", "json", "bench", "--quick", "-n", "1", "--only", ONLY])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(within(LIMIT), run).await.context("it takes too long")??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "it ended with {}: {said}", output.status);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let results = report["results"].as_array().context("no results")?;
    let median = |name: &str, state: &str| {
        let found = results.iter().find(|result| {
            result["name"] == name && (state.is_empty() || result["params"]["state"] == state)
        });
        found
            .and_then(|result| result["p50"].as_f64())
            .with_context(|| format!("{name} {state} was not measured"))
    };
    for name in [
        "restore_step",
        "create_first_exec",
        "kill",
        "create_all",
        "kill_all",
        "exec_roundtrip",
        "fork_pause",
    ] {
        ensure!(median(name, "")? > 0.0, "{name} takes no time");
    }
    for name in ["fork_tax", "model_fork_all", "snapshot", "restore_first_exec", "cold_boot"] {
        ensure!(median(name, "")? > 0.0, "{name} takes no time");
    }
    // A child shares what its parent held until it writes all 64 MiB of it.
    let (started, written) =
        (median("private_per_child", "started")?, median("private_per_child", "written")?);
    ensure!(started < 32.0 && written > 64.0, "private memory went from {started} to {written} MiB");
    ensure!(median("model_pss_sum", "started")? > 32.0, "the model is not there");
    let left = world.node.client.list(false).await?;
    ensure!(!left.iter().any(|sandbox| sandbox.metadata.contains_key("keiki.run")), "a sandbox was left");
    Ok(())
}
