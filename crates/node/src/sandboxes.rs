//! The sandboxes that this node knows, including those still being created.

use crate::{
    error::{Error, Result},
    sandbox::Sandbox,
};
use keiki_types::SandboxId;
use parking_lot::RwLock;
use std::{cmp::Reverse, collections::HashMap, sync::Arc};

#[derive(Default)]
pub struct Sandboxes {
    all: RwLock<HashMap<SandboxId, Arc<Sandbox>>>,
}

impl Sandboxes {
    /// # Errors
    /// 404 if there is no such sandbox.
    pub fn get(&self, id: SandboxId) -> Result<Arc<Sandbox>> {
        self.all.read().get(&id).cloned().ok_or_else(|| Error::NotFound(format!("no sandbox {id}")))
    }

    /// Newest first.
    pub fn all(&self) -> Vec<Arc<Sandbox>> {
        let mut all: Vec<_> = self.all.read().values().cloned().collect();
        all.sort_by_key(|sandbox| Reverse(sandbox.id));
        all
    }

    pub fn insert(&self, sandbox: &Arc<Sandbox>) {
        self.all.write().insert(sandbox.id, Arc::clone(sandbox));
    }

    pub fn remove(&self, id: SandboxId) {
        self.all.write().remove(&id);
    }
}
