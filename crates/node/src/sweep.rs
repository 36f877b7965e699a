//! Background work: TTLs that expire, machines that exit.

use crate::{
    daemon::Inner,
    fleet::CONSOLE_TAIL,
    lifecycle::Sweep,
    sandbox::{CONSOLE_MARK, Claim, Live, Sandbox},
};
use keiki_types::{Status, api::EventKind};
use std::{
    sync::{Arc, Weak},
    time::Duration,
};

/// How often TTLs are checked.
const EVERY: Duration = Duration::from_millis(500);

/// Runs as long as the node.
pub(crate) async fn sweeper(node: Weak<Inner>) {
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(node) = node.upgrade() else { return };
        if node.under_way.is_closed() {
            return;
        }
        for sandbox in node.sandboxes.all() {
            if let Some(claim) = sandbox.claim_if_idle() {
                node.journal.emit(sandbox.id, EventKind::Expired, |_| {});
                let sweep = Arc::clone(&node).sweep(sandbox, claim);
                tokio::spawn(node.under_way.track_future(sweep));
            }
        }
    }
}

impl Inner {
    async fn sweep(self: Arc<Self>, sandbox: Arc<Sandbox>, claim: Claim) {
        let Claim { verdict, before, verb } = claim;
        let done = match (verdict, sandbox.live()) {
            (Sweep::Delete, _) => self.delete_claimed(&sandbox, before).await,
            (Sweep::Hibernate, Some(live)) => self.hibernate_locked(&sandbox, &live).await,
            (Sweep::Keep, _) | (Sweep::Hibernate, None) => Ok(()),
        };
        drop(verb);
        if let Err(error) = done {
            tracing::error!(id = %sandbox.id, error = &error as &dyn std::error::Error, "its TTL expired, but it could not be stopped; retrying later");
            sandbox.touch();
        }
    }

    /// Watches a machine: if it exits, its sandbox has failed and its resources are reclaimed.
    pub(crate) fn watch(self: &Arc<Self>, sandbox: Arc<Sandbox>, live: Arc<Live>) {
        let node = Arc::downgrade(self);
        tokio::spawn(async move {
            let how = live.machine.ended().await;
            let Some(node) = node.upgrade() else { return };
            let _counted = node.under_way.token();
            let _verb = sandbox.verb.lock().await;
            let still_its = sandbox.live().is_some_and(|now| Arc::ptr_eq(&now, &live));
            if !still_its {
                return;
            }
            let console = live.machine.console(CONSOLE_TAIL).await;
            let console = String::from_utf8_lossy(&console).trim().to_owned();
            let error = if console.is_empty() { how } else { format!("{how}{CONSOLE_MARK}{console}") };
            tracing::warn!(id = %sandbox.id, error, "a machine exited");
            node.journal.emit(sandbox.id, EventKind::Failed, |event| event.reason = Some(error.clone()));
            let record = sandbox.set_live(None, |record| {
                record.status = Status::Failed;
                record.slot = None;
                record.error = Some(error);
            });
            if let Err(error) = node.journal.records.put(vec![record]).await {
                tracing::error!(id = %sandbox.id, error = &error as &dyn std::error::Error, "a failure could not be recorded");
            }
            node.fleet.end(&live).await;
        });
    }
}
