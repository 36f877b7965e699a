//! SSH host keys: every new machine gets its own.

use super::{
    connections::processes_named,
    machine_id::{Kept, remove},
    program,
};
use crate::{cgroup, exec::signal_all, log, reaper::Reaper};
use rustix::process::Signal;
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::{Mutex, Notify},
    task::JoinHandle,
};

const SSH: &str = "/etc/ssh";
const KEYGEN: &str = "/usr/bin/ssh-keygen";
/// Types of host key, and the time limit for each. An RSA key takes seconds on an emulated
/// processor, so it is made after the release; until then there is no RSA key.
const QUICK_KEYS: [&str; 2] = ["ed25519", "ecdsa"];
const SLOW_KEYS: [&str; 1] = ["rsa"];
const QUICK: Duration = Duration::from_secs(10);
const SLOW: Duration = Duration::from_secs(300);

/// Host keys that are still being made after the release.
#[derive(Debug, Default)]
pub struct SlowKeys(Mutex<Option<Making>>);

#[derive(Debug)]
struct Making {
    kinds: Vec<&'static str>,
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl SlowKeys {
    /// Makes keys in the background. A server has the others until then.
    pub async fn begin(&self, reaper: &Arc<Reaper>, kinds: Vec<&'static str>) {
        if kinds.is_empty() {
            return;
        }
        let (reaper, stop) = (reaper.clone(), Arc::new(Notify::new()));
        let (wanted, stopped) = (kinds.clone(), stop.clone());
        let task = tokio::spawn(async move {
            match make_keys(&reaper, &wanted, SLOW, &stopped).await {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    log::line(&format!("SSH host keys: {error}"));
                }
                _ => {}
            }
        });
        *self.0.lock().await = Some(Making { kinds, stop, task });
    }

    /// Stops the task under way; returns what it had to make. Without this, all copies of a machine
    /// that is frozen in the meantime would make the same key.
    async fn stop(&self) -> io::Result<Vec<&'static str>> {
        let Some(making) = self.0.lock().await.take() else { return Ok(vec![]) };
        if making.task.is_finished() {
            return Ok(vec![]);
        }
        making.stop.notify_one();
        making.task.await.map_err(io::Error::other)?;
        Ok(making.kinds)
    }
}

/// Replaces the host keys and signals the server. Returns the types to make after the release.
pub async fn host_keys(reaper: &Arc<Reaper>, slow: &SlowKeys, kept: &Kept) -> io::Result<Vec<&'static str>> {
    let unfinished = slow.stop().await?;
    let kinds: Vec<_> = QUICK_KEYS
        .into_iter()
        .chain(SLOW_KEYS)
        .filter(|kind| key(kind).exists() || unfinished.contains(kind))
        .collect();
    if kept.has("ssh-host-keys") {
        return Ok(unfinished);
    }
    for kind in &kinds {
        // An unfinished key may be missing, or its public half.
        for path in [key(kind), key(kind).with_extension("pub")] {
            remove(&path)?;
        }
    }
    let (slow, quick): (Vec<_>, Vec<_>) = kinds.into_iter().partition(|kind| SLOW_KEYS.contains(kind));
    if !quick.is_empty() {
        make_keys(reaper, &quick, QUICK, &Notify::new()).await?;
    }
    Ok(slow)
}

async fn make_keys(reaper: &Arc<Reaper>, kinds: &[&str], limit: Duration, stop: &Notify) -> io::Result<()> {
    if !Path::new(KEYGEN).exists() {
        // A server without keys fails visibly; a server with its original's keys would not.
        return Ok(());
    }
    for kind in kinds {
        let path = key(kind);
        let words = ["-q", "-t", kind, "-N", "", "-C", "", "-f"].map(str::to_owned);
        let arguments = words.into_iter().chain([path.to_string_lossy().into_owned()]).collect();
        let exited = program::run(reaper, Path::new(KEYGEN), arguments, &[], limit, stop).await?;
        if exited.code != 0 {
            return Err(io::Error::other(format!(
                "ssh-keygen exited with {}: {}",
                exited.code, exited.output
            )));
        }
    }
    // The server has read its keys when it started. On SIGHUP it reads them again as soon as it
    // resumes. Its processes that serve a connection exit, as their connection is gone.
    signal_all(&processes_named(&cgroup::user_processes(), "sshd"), Signal::HUP);
    Ok(())
}

fn key(kind: &str) -> PathBuf {
    Path::new(SSH).join(format!("ssh_host_{kind}_key"))
}
