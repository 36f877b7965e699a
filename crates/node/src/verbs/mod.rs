//! The verbs that make, change and end sandboxes, one file for each. Each is a short composition
//! over [`Births`](super::births::Births), [`freeze`](super::freeze) and
//! [`Fleet`](super::fleet::Fleet).

mod create;
mod delete;
mod fork;
mod hibernate;
mod pause;
mod promote;
mod snapshot;
mod wake;

use crate::{
    daemon::Inner,
    error::{Error, Result},
    lifecycle::{Decision, Verb},
    sandbox::{Live, Sandbox, Use},
};
use keiki_types::SandboxId;
use std::sync::Arc;
use tokio::sync::MutexGuard;

/// Disk space that a machine thawed from stored files needs before it writes anything.
const RESTORE_DISK_BYTES: u64 = 16 << 20;

impl Inner {
    /// The machine of a sandbox that can be frozen, its verb held: woken first if it is hibernated.
    async fn freezable<'a>(
        self: &Arc<Self>,
        sandbox: &'a Arc<Sandbox>,
    ) -> Result<(MutexGuard<'a, ()>, Arc<Live>)> {
        let verb = sandbox.verb.lock().await;
        if sandbox.decide(Verb::Freeze)? == Decision::WakeFirst {
            self.wake_locked(sandbox).await?;
        }
        sandbox.touch();
        Ok((verb, machine_of(sandbox)?))
    }

    /// Begins a use of a sandbox, waking it if need be.
    pub(crate) async fn begin(self: &Arc<Self>, id: SandboxId) -> Result<Use> {
        let wake = || {
            let waking = Arc::clone(self);
            async move { self.to_the_end(async move { waking.wake(id).await }).await.map(drop) }
        };
        self.sandboxes.get(id)?.begin(wake).await
    }
}

fn machine_of(sandbox: &Sandbox) -> Result<Arc<Live>> {
    sandbox.live().ok_or_else(|| Error::Conflict(format!("sandbox {} has no machine", sandbox.id)))
}
