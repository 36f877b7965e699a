//! `keiki tree`.

use crate::{context::Context, exit::Outcome, ids::short};
use keiki_client::{
    SandboxId, SnapshotId,
    api::{Sandbox, Snapshot},
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, clap::Args)]
pub struct Args {}

#[derive(Serialize)]
struct Lineage<'a> {
    sandboxes: &'a [Sandbox],
    snapshots: &'a [Snapshot],
}

pub async fn run(context: Context, _: Args) -> Outcome {
    let (sandboxes, snapshots) = (context.client.list(false).await?, context.client.snapshots(None).await?);
    let lineage = Lineage { sandboxes: &sandboxes, snapshots: &snapshots };
    context.out.result(&lineage, || draw(&sandboxes, &snapshots))
}

/// A node of the tree. Ids sort by creation time, and so do siblings.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Template(String),
    Snapshot(SnapshotId),
    Sandbox(SandboxId),
}

#[derive(Default)]
struct Tree {
    labels: BTreeMap<Node, String>,
    children: BTreeMap<Node, BTreeSet<Node>>,
    has_parent: BTreeSet<Node>,
}

impl Tree {
    fn new(sandboxes: &[Sandbox], snapshots: &[Snapshot]) -> Self {
        let mut tree = Self::default();
        for sandbox in sandboxes {
            let how = match sandbox.boot_mode.as_str() {
                "" | "create" => String::new(),
                how => format!(", {how}"),
            };
            let label = format!("{} {}{how}", short(sandbox.id), sandbox.status);
            tree.labels.insert(Node::Sandbox(sandbox.id), label);
        }
        for snapshot in snapshots {
            tree.labels.insert(Node::Snapshot(snapshot.id), format!("snapshot {}", short(snapshot.id)));
        }
        for sandbox in sandboxes {
            let template = root(&sandbox.template, &sandbox.template_version);
            // Not `parent_snapshot_id`: after a snapshot that is one of its own.
            let parent = match (sandbox.parent_sandbox_id, sandbox.from_snapshot) {
                (Some(id), _) => Node::Sandbox(id),
                (None, Some(id)) => Node::Snapshot(id),
                (None, None) => template.clone(),
            };
            tree.link(&template, parent, Node::Sandbox(sandbox.id));
        }
        for snapshot in snapshots {
            let template = root(&snapshot.template, &snapshot.template_version);
            let (of, parent) = (Node::Sandbox(snapshot.sandbox_id), snapshot.parent_snapshot_id);
            // If the sandbox is gone, hang it from the previous snapshot, if there is one.
            let parent = match parent.map(Node::Snapshot) {
                Some(before) if !tree.labels.contains_key(&of) && tree.labels.contains_key(&before) => before,
                _ => of,
            };
            tree.link(&template, parent, Node::Snapshot(snapshot.id));
        }
        tree
    }

    fn link(&mut self, template: &Node, parent: Node, child: Node) {
        if !self.labels.contains_key(&parent) {
            let gone = match &parent {
                Node::Template(name) => name.clone(),
                Node::Snapshot(id) => format!("snapshot {} (gone)", short(id)),
                Node::Sandbox(id) => format!("{} (gone)", short(id)),
            };
            self.labels.insert(parent.clone(), gone);
            if parent != *template {
                // The record of its parents is gone too: hang it from its template.
                self.link(template, template.clone(), parent.clone());
            }
        }
        self.has_parent.insert(child.clone());
        self.children.entry(parent).or_default().insert(child);
    }

    fn draw(&self) -> String {
        let mut lines = Vec::new();
        let mut drawn = BTreeSet::new();
        let roots = self.labels.keys().filter(|node| !self.has_parent.contains(*node));
        // Draw what only a cycle reaches last.
        for root in roots.chain(self.labels.keys()) {
            self.branch(root, &mut lines, &mut drawn);
        }
        lines.join("\n")
    }

    /// Depth first, with a stack instead of recursion: lineages may be long. `drawn` breaks cycles,
    /// which only contradictory records could contain.
    fn branch(&self, root: &Node, lines: &mut Vec<String>, drawn: &mut BTreeSet<Node>) {
        let mut waiting = vec![(root.clone(), String::new(), String::new())];
        while let Some((node, lead, indent)) = waiting.pop() {
            if !drawn.insert(node.clone()) {
                continue;
            }
            let label = self.labels.get(&node).map_or("", String::as_str);
            lines.push(format!("{lead}{label}"));
            let children: Vec<&Node> = self.children.get(&node).into_iter().flatten().collect();
            for (at, child) in children.iter().enumerate().rev() {
                let last = at + 1 == children.len();
                let (branch, below) = if last { ("└── ", "    ") } else { ("├── ", "│   ") };
                waiting.push(((*child).clone(), format!("{indent}{branch}"), format!("{indent}{below}")));
            }
        }
    }
}

fn root(template: &str, version: &str) -> Node {
    let version: String = version.chars().take(12).collect();
    Node::Template(if version.is_empty() { template.to_owned() } else { format!("{template}@{version}") })
}

fn draw(sandboxes: &[Sandbox], snapshots: &[Snapshot]) -> String {
    Tree::new(sandboxes, snapshots).draw()
}

#[cfg(test)]
mod tests {
    use super::draw;
    use keiki_client::api::{Sandbox, Snapshot};
    use serde_json::json;

    fn id(n: u32) -> String {
        format!("0198f2a4-7c1e-7000-8000-{n:012}")
    }

    fn sandbox(n: u32, parent: Option<u32>, from: Option<u32>, how: &str) -> Sandbox {
        serde_json::from_value(json!({
            "id": id(n), "template": "base", "template_version": "0123456789abcdef", "cpu": 1,
            "memory_mb": 256, "disk_mb": 1024, "status": "running",
            "guest_ip": "", "created_at": "", "metadata": {},
            "from_snapshot": from.map(id), "boot_ms": 1, "boot_mode": how, "persistent": false,
            "ttl_seconds": 1, "idle_seconds": 0, "parent_sandbox_id": parent.map(id),
            "parent_snapshot_id": from.map(id), "generation": 1, "engine": "qemu",
        }))
        .unwrap()
    }

    fn snapshot(n: u32, of: u32, parent: Option<u32>) -> Snapshot {
        serde_json::from_value(json!({
            "id": id(n), "sandbox_id": id(of), "template": "base", "template_version": "0123456789abcdef",
            "size_bytes": 1, "created_at": "", "shape": {"vcpus": 1, "memory_mib": 256, "disk_mib": 1024},
            "parent_snapshot_id": parent.map(id), "engine": "qemu", "metadata": {},
        }))
        .unwrap()
    }

    #[test]
    fn lineage_is_drawn_from_the_template_down() {
        let sandboxes = [
            sandbox(1, None, None, "create"),
            sandbox(2, Some(1), None, "fork"),
            sandbox(3, Some(2), None, "fork"),
            sandbox(4, None, Some(10), "restore"),
        ];
        let drawn = draw(&sandboxes, &[snapshot(10, 1, None)]);
        let expected = "\
base@0123456789ab
└── 000000000001 running
    ├── snapshot 000000000010
    │   └── 000000000004 running, restore
    └── 000000000002 running, fork
        └── 000000000003 running, fork";
        assert_eq!(drawn, expected);
    }

    #[test]
    fn a_sandbox_does_not_hang_from_its_own_snapshot() {
        let parent = Sandbox { parent_snapshot_id: id(10).parse().ok(), ..sandbox(1, None, None, "create") };
        let child = Sandbox { parent_snapshot_id: id(10).parse().ok(), ..sandbox(2, Some(1), None, "fork") };
        let expected = "\
base@0123456789ab
└── 000000000001 running
    ├── snapshot 000000000010
    └── 000000000002 running, fork";
        assert_eq!(draw(&[parent, child], &[snapshot(10, 1, None)]), expected);
    }

    #[test]
    fn ancestors_that_are_gone_keep_their_descendants_together() {
        let sandboxes = [sandbox(2, Some(1), None, "fork"), sandbox(3, Some(1), None, "fork")];
        let expected = "\
base@0123456789ab
└── 000000000001 (gone)
    ├── 000000000002 running, fork
    └── 000000000003 running, fork";
        assert_eq!(draw(&sandboxes, &[]), expected);
        // Snapshot 11 is of a sandbox that is gone, which was restored from snapshot 10.
        let drawn = draw(&[], &[snapshot(10, 1, None), snapshot(11, 2, Some(10))]);
        let expected = "\
base@0123456789ab
└── 000000000001 (gone)
    └── snapshot 000000000010
        └── snapshot 000000000011";
        assert_eq!(drawn, expected);
    }

    #[test]
    fn nothing_and_contradictions_end() {
        assert_eq!(draw(&[], &[]), "");
        let circle = [sandbox(1, Some(2), None, "fork"), sandbox(2, Some(1), None, "fork")];
        // A cycle has no root, yet it is drawn, once.
        assert_eq!(draw(&circle, &[]).lines().count(), 2);
    }
}
