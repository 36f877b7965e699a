//! Baked templates: looking them up for a create, preparing VMs for them ahead, removing them.

use super::{Baked, REFILL_PAUSE, RETRY_AFTER};
use crate::{
    daemon::Inner,
    error::{Error, Result},
    records::TemplateRecord,
};
use keiki_sys::failpoint;
use keiki_types::{SandboxId, Sharing, TemplateName, api::BuildTemplate};
use std::{path::PathBuf, sync::Arc};
use tokio::sync::OwnedRwLockReadGuard;

impl Inner {
    /// A baked template, which stays as long as it is held, or what to do about it.
    pub(crate) async fn baked(
        self: &Arc<Self>,
        name: &TemplateName,
    ) -> Result<(Arc<Baked>, OwnedRwLockReadGuard<()>)> {
        while let Some(baked) = self.templates.current(name.as_str()) {
            let held = self.sources.hold(self.dir_of(&baked)).await;
            if self.templates.current(name.as_str()).is_some_and(|now| Arc::ptr_eq(&now, &baked)) {
                return Ok((baked, held));
            }
        }
        if self.templates.running(name.as_str()).is_none() {
            self.build_template(BuildTemplate { name: name.to_string(), ..BuildTemplate::default() }).await?;
        }
        Err(Error::Busy {
            why: format!("template {name} is being built; `keiki template build {name}` shows its progress"),
            retry_after: RETRY_AFTER,
        })
    }

    /// Whether this template has a different version by now. False if it no longer exists.
    pub(crate) fn is_rebuilt(&self, template: &str, version: &str) -> bool {
        self.templates.current(template).is_some_and(|current| current.record.version != version)
    }

    /// Ends the VMs prepared ahead for a template version and removes its files; machines made from
    /// it keep running.
    pub(super) async fn retire(&self, old: &Baked) -> Result<()> {
        self.close_ahead(old).await;
        let dir = self.dir_of(old);
        let _claim = self.sources.claim(&dir).await;
        self.fleet.engine.forget(&dir).await;
        self.store.remove(dir).await
    }

    fn dir_of(&self, baked: &Baked) -> PathBuf {
        self.store.template(&baked.record.name, &baked.record.version)
    }

    async fn close_ahead(&self, baked: &Baked) {
        let ready = {
            let mut ahead = baked.ahead.lock();
            ahead.closed = true;
            std::mem::take(&mut ahead.ready)
        };
        for prepared in ready {
            self.fleet.cancel(prepared).await;
        }
    }

    /// Abandons running builds and ends the VMs prepared ahead, for a node that stops.
    pub(crate) async fn close_templates(&self) {
        self.templates.building.lock().await.shutdown().await;
        let all: Vec<_> = self.templates.state.lock().baked.values().cloned().collect();
        for baked in all {
            self.close_ahead(&baked).await;
        }
    }

    pub(crate) async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        // No build starts until it is gone: the build would write where this removes.
        let _no_build = self.templates.building.lock().await;
        if self.templates.running(name.as_str()).is_some() {
            return Err(Error::Conflict(format!("template {name} is being built")));
        }
        let _armed = failpoint::arm("delete_template");
        let baked = self.templates.state.lock().baked.remove(name.as_str());
        let baked = baked.ok_or_else(|| Error::NotFound(format!("no template {name}")))?;
        self.journal.records.remove::<TemplateRecord>(vec![name.as_str().into()]).await?;
        self.retire(&baked).await
    }

    /// Opens a recorded template at start. One that cannot be used here any more (another engine
    /// version, a damaged file) is forgotten: it is baked again when it is needed.
    pub(crate) async fn open_template(self: &Arc<Self>, record: TemplateRecord) -> Result<()> {
        let dir = self.store.template(&record.name, &record.version);
        match self.fleet.load(&dir, Sharing::Node).await {
            Ok(frozen) => {
                let baked = Baked::new(record.clone(), frozen);
                self.templates.state.lock().baked.insert(record.name, Arc::clone(&baked));
                self.refill(&baked);
                Ok(())
            }
            Err(error) => {
                tracing::warn!(
                    template = record.name,
                    error = &error as &dyn std::error::Error,
                    "must be baked again"
                );
                self.journal.records.remove::<TemplateRecord>(vec![record.name.clone()]).await?;
                self.store.remove(self.store.template(&record.name, &record.version)).await
            }
        }
    }

    /// Prepares VMs in the background until as many wait as are configured.
    pub(crate) fn refill(self: &Arc<Self>, baked: &Arc<Baked>) {
        let missing = {
            let mut ahead = baked.ahead.lock();
            if ahead.closed {
                return;
            }
            let missing = self.config.seats_ahead.saturating_sub(ahead.ready.len() + ahead.making);
            ahead.making += missing;
            missing
        };
        if missing == 0 {
            return;
        }
        let (node, baked) = (Arc::clone(self), Arc::clone(baked));
        let counted = self.under_way.token();
        tokio::spawn(async move {
            let _counted = counted;
            tokio::time::sleep(REFILL_PAUSE).await;
            for _ in 0..missing {
                let _held = node.sources.hold(node.dir_of(&baked)).await;
                if baked.ahead.lock().closed {
                    return;
                }
                let prepared = node.fleet.prepare(SandboxId::new(), baked.frozen.image()).await;
                if let Some(unwanted) = baked.keep_ahead(prepared) {
                    node.fleet.cancel(unwanted).await;
                }
            }
        });
    }
}
