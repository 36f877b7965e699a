//! Promote: one child of a fork-tree stays, its siblings are deleted.

use crate::{
    daemon::Inner,
    error::{Error, Result},
};
use keiki_sys::failpoint::arm;
use keiki_types::{
    SandboxId,
    api::{Promote, Promoted},
};
use std::collections::BTreeMap;

/// The label of all children of one fork-tree.
const TREE: &str = "fork_tree_id";

impl Inner {
    pub(crate) async fn promote(&self, id: SandboxId, asked: Promote) -> Result<Promoted> {
        let _armed = arm("promote");
        let winner = self.sandboxes.get(id)?.record();
        let tree_id = asked.tree_id.or_else(|| winner.metadata.get(TREE).cloned());
        let tree_id = tree_id.ok_or_else(|| {
            Error::Invalid(format!("tree_id: sandbox {id} does not come from a fork-tree: name the tree"))
        })?;
        let (mut deleted, mut failures) = (Vec::new(), BTreeMap::new());
        let siblings = self.sandboxes.all().into_iter().filter(|_| asked.cleanup_siblings);
        for sibling in siblings.filter(|sibling| sibling.id != id) {
            if sibling.record().metadata.get(TREE) != Some(&tree_id) {
                continue;
            }
            match self.delete(sibling.id).await {
                Ok(()) => deleted.push(sibling.id),
                Err(error) => drop(failures.insert(sibling.id.to_string(), error.to_string())),
            }
        }
        Ok(Promoted { winner: id, tree_id, deleted, failures })
    }
}
