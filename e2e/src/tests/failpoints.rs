//! The daemon dies after each numbered step of each verb (`keiki_sys::failpoint`). Whatever the
//! step: what was there before is still there, what was incomplete is not, and everything listed
//! works.
//!
//! No list says how many steps a verb has: the test tries them until the verb succeeds. A short run
//! tries some of them, `KEIKI_E2E_LONG` tries all.

use crate::{
    World, long,
    node::{Node, Options, Traces},
    patience,
    sandbox::Sandbox,
    within,
};
use anyhow::{Context, Result, bail, ensure};
use keiki_types::{
    Status,
    api::{BuildTemplate, CreateSandbox, ExecRequest, ForkSandbox, ForkTree, Promote, Snapshot},
};
use std::{
    collections::BTreeMap,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Steps of a short run: the first, and some in the middle of things.
const SHORT: [u32; 3] = [1, 4, 9];
/// More than any verb has.
const MOST: u32 = 80;
/// Seconds a node may take to die at its failpoint.
const DEATH: u64 = 5;
/// VMs prepared ahead.
const AHEAD: usize = 2;
/// Slots built ahead, and one being built.
const SLOTS_AHEAD: usize = 9;

/// A verb, how many sandboxes it creates, and its minimum of steps: fewer means that failpoints are
/// missing.
const VERBS: [(&str, usize, u32); 12] = [
    ("create", 1, 5),
    ("restore", 1, 6),
    ("snapshot", 0, 8),
    ("fork", 2, 10),
    ("hibernate", 0, 8),
    ("wake", 0, 6),
    ("pause", 0, 4),
    ("resume", 0, 4),
    ("delete", 0, 3),
    ("delete_snapshot", 0, 2),
    ("promote", 3, 9),
    ("exec", 0, 4),
];

/// A node and what must outlive every death of it.
struct Trial {
    node: Node,
    keeper: Sandbox,
    kept: Snapshot,
    mounts: usize,
    /// Digests of the files that other machines use.
    bases: Vec<String>,
}

pub async fn a_node_killed_at_any_step_of_any_verb(world: Arc<World>) -> Result<()> {
    let mut trial = Trial::begin(&world, "steps").await?;
    for (verb, makes, fewest) in VERBS {
        let steps = trial.all_steps(verb, makes).await?;
        ensure!(!long() || steps >= fewest, "{verb} has {steps} steps, not {fewest} and more");
        ensure!(!long() || trial.digests()? == trial.bases, "{verb} changed a base file");
    }
    ensure!(trial.digests()? == trial.bases, "a base file has changed");
    trial.end().await
}

pub async fn a_node_killed_while_it_bakes_or_starts(world: Arc<World>) -> Result<()> {
    let mut trial = Trial::begin(&world, "builds").await?;
    for step in (1..MOST).filter(|step| long() || [2, 12].contains(step)) {
        if !trial.step("build", 0, step).await? {
            break;
        }
    }
    for step in (1..MOST).filter(|step| long() || *step == 2) {
        if !trial.step("delete_template", 0, step).await? {
            ensure!(step > 2, "a template is deleted in {} steps", step - 1);
            break;
        }
    }
    for step in (1..MOST).filter(|step| long() || [1, 4].contains(step)) {
        if !trial.start_failing(step).await? {
            ensure!(step > 4, "a start has {} steps", step - 1);
            return trial.end().await;
        }
    }
    ensure!(!long(), "a start never gets through");
    trial.end().await
}

impl Trial {
    async fn begin(world: &World, name: &str) -> Result<Self> {
        let node = Node::start(&world.places, Options::named(name)).await?;
        node.bake().await?;
        let keeper = Sandbox::create(&node.client).await?;
        keeper.sh("echo kept > /dev/shm/x && echo kept > /root/x && sync").await?;
        let kept = keeper.snapshot().await?;
        let mounts = node.traces()?.mounts;
        let mut trial = Self { node, keeper, kept, mounts, bases: Vec::new() };
        trial.bases = trial.digests()?;
        Ok(trial)
    }

    async fn end(self) -> Result<()> {
        let restored = Sandbox::restore(&self.node.client, &self.kept).await?;
        ensure!(restored.sh("cat /dev/shm/x").await? == "kept", "the snapshot from before all this");
        self.node.finish().await
    }

    /// Kills the node at every step of a verb until the verb succeeds; returns the number of steps.
    async fn all_steps(&mut self, verb: &str, makes: usize) -> Result<u32> {
        for step in 1..MOST {
            if (long() || SHORT.contains(&step)) && !self.step(verb, makes, step).await? {
                return Ok(step - 1);
            }
        }
        ensure!(!long(), "{verb} has more than {MOST} steps");
        Ok(MOST)
    }

    /// One kill. False: the verb succeeded, it has no such step.
    async fn step(&mut self, verb: &str, makes: usize, step: u32) -> Result<bool> {
        self.restart(Some(&format!("{verb}:{step}"))).await?;
        let done = self.run(verb).await.with_context(|| format!("{verb} with a death at step {step}"));
        let died = self.node.has_died(if done.is_ok() { Duration::ZERO } else { within(DEATH) }).await?;
        if !died {
            done?;
        }
        self.restart(None).await?;
        if verb == "delete_template" {
            self.whole_or_gone().await?;
            self.node.bake().await?;
        }
        let checked = self.check(verb, makes).await;
        checked.with_context(|| {
            format!("after a death at step {step} of {verb}; the node says\n{}", self.node.log_tail())
        })?;
        Ok(died)
    }

    /// A template listed as ready makes sandboxes; any other has no files.
    async fn whole_or_gone(&self) -> Result<()> {
        let is_ready = self.node.client.template(&"base".parse()?).await?.status == "ready";
        let there = self.entries("templates/base")?;
        ensure!(there == usize::from(is_ready), "{there} versions of a template that is ready: {is_ready}");
        if is_ready {
            let made = Sandbox::create(&self.node.client).await?;
            made.sh("true").await?;
            made.kill().await?;
        }
        Ok(())
    }

    async fn start_failing(&mut self, step: u32) -> Result<bool> {
        let second = Sandbox::create(&self.node.client).await?;
        self.node.client.hibernate(second.id).await?;
        let died = self.restart(Some(&format!("start:{step}"))).await.is_err();
        self.restart(None).await?;
        self.over(&second)
            .sh("cat /dev/shm/x; true")
            .await
            .context("hibernated before the start that failed")?;
        self.check("start", 1).await.with_context(|| format!("after a start that died at step {step}"))?;
        Ok(died)
    }

    async fn restart(&mut self, fail: Option<&str>) -> Result<()> {
        self.node.kill().await?;
        self.node = self.node.restart_failing(fail).await?;
        self.keeper = self.over(&self.keeper);
        Ok(())
    }

    fn over(&self, sandbox: &Sandbox) -> Sandbox {
        Sandbox { client: self.node.client.clone(), id: sandbox.id }
    }

    /// Prepares for the verb, then runs it.
    async fn run(&self, verb: &str) -> Result<()> {
        let client = self.node.client.clone().with_retry_budget(Duration::ZERO);
        let id = self.keeper.id;
        match verb {
            "create" => drop(client.create(&CreateSandbox::default()).await?),
            "restore" => drop(client.restore(self.kept.id, CreateSandbox::default()).await?),
            "snapshot" => drop(client.snapshot(id).await?),
            "fork" => {
                let two = ForkSandbox { count: Some(2), ..ForkSandbox::default() };
                drop(client.fork(id, &two).await?);
            }
            "hibernate" => drop(client.hibernate(id).await?),
            "wake" => {
                client.hibernate(id).await?;
                drop(client.wake(id).await?);
            }
            "pause" => drop(client.pause(id).await?),
            "resume" => {
                client.pause(id).await?;
                drop(client.resume(id).await?);
            }
            "delete" => client.delete(Sandbox::create(&client).await?.id).await?,
            "delete_snapshot" => client.delete_snapshot(client.snapshot(id).await?.id).await?,
            "promote" => {
                let three = ForkTree { count: 3, metadata: None, ttl_seconds: None };
                let tree = client.fork_tree(id, &three).await?.children;
                let winner = tree.first().context("no children")?.id;
                let promoted =
                    client.promote(winner, &Promote { cleanup_siblings: true, tree_id: None }).await?;
                ensure!(promoted.deleted.len() == 2, "{promoted:?}");
            }
            "exec" => {
                let line = ExecRequest {
                    cmd: Some("cat; exit 3".into()),
                    stdin: Some("hi".into()),
                    ..ExecRequest::default()
                };
                let done = client.exec(id, &line).await?;
                ensure!((done.stdout.as_str(), done.exit_code) == ("hi", 3), "{done:?}");
            }
            "delete_template" => client.delete_template(&"base".parse()?).await?,
            "build" => {
                let again = BuildTemplate { name: "base".into(), rebake: true, ..BuildTemplate::default() };
                let mut build = client.build_template(&again).await?;
                while build.ended_at.is_empty() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    build = client.build(&build.id).await?;
                }
                ensure!(build.status == "done", "{}", build.error);
            }
            other => bail!("no verb {other}"),
        }
        Ok(())
    }

    /// The invariants. Leaves what was there before.
    async fn check(&self, verb: &str, makes: usize) -> Result<()> {
        let client = &self.node.client;
        if self.keeper.view().await?.status == Status::Paused {
            client.resume(self.keeper.id).await?;
        }
        ensure!(
            self.keeper.sh("cat /dev/shm/x /root/x").await? == "kept\nkept",
            "the sandbox lost something"
        );
        let mut others = client.list(false).await?;
        others.retain(|one| one.id != self.keeper.id);
        // All or nothing; items deleted one by one may be partly gone.
        let expected = match verb {
            "delete" => others.len() <= 1,
            "promote" => (1..=makes).contains(&others.len()),
            _ => others.is_empty() || others.len() == makes,
        };
        ensure!(expected, "{} of {makes} sandboxes", others.len());
        for other in others {
            ensure!(other.error.is_none(), "{}: {:?}", other.id, other.error);
            let other = Sandbox { client: client.clone(), id: other.id };
            other.sh("true").await?;
            other.kill().await?;
        }
        let mut snapshots = client.snapshots(None).await?;
        ensure!(
            self.entries("snapshots")? == snapshots.len(),
            "directories without snapshots, or the other way"
        );
        snapshots.retain(|one| one.id != self.kept.id);
        ensure!(snapshots.len() <= 1, "{} snapshots", snapshots.len());
        for snapshot in snapshots {
            let restored = Sandbox::restore(client, &snapshot).await?;
            ensure!(restored.sh("cat /dev/shm/x /root/x").await? == "kept\nkept", "a snapshot is not whole");
            restored.kill().await?;
            client.delete_snapshot(snapshot.id).await?;
        }
        self.settled().await
    }

    /// The host and the store have only the keeper, and what is prepared ahead.
    async fn settled(&self) -> Result<()> {
        let mut seen = String::new();
        for _ in 0..60 * patience() {
            let traces = self.node.traces()?;
            let rest = ["scratch", "hibernated"].map(|part| self.entries(part));
            let rest: Vec<usize> = rest.into_iter().collect::<Result<_>>()?;
            let Traces { monitors, mounts, namespaces, sandboxes } = &traces;
            let most = 1 + AHEAD;
            let fits = monitors.len() <= most && *sandboxes <= most && *namespaces <= most + SLOTS_AHEAD;
            if fits && *mounts == self.mounts && rest == [0, 0] && self.entries("templates/base")? == 1 {
                return Ok(());
            }
            seen = format!("{traces:?}, {rest:?} in scratch and hibernated");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("left behind: {seen}")
    }

    fn entries(&self, part: &str) -> Result<usize> {
        match std::fs::read_dir(self.node.data.join("store").join(part)) {
            Ok(entries) => Ok(entries.count()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error).context(part.to_owned()),
        }
    }

    /// Of the template's and the snapshot's files, each once; of the root disk, which has
    /// gigabytes, what changes with its contents.
    fn digests(&self) -> Result<Vec<String>> {
        let store = self.node.data.join("store");
        let mut files = Vec::new();
        for part in ["templates", "snapshots"] {
            collect(&store.join(part), &mut files)?;
        }
        let mut disks = Vec::new();
        let mut once = BTreeMap::new();
        for file in files {
            let meta = std::fs::metadata(&file)?;
            if file.extension().is_some_and(|extension| extension == "raw") {
                disks.push(format!(
                    "{} {} {} {}",
                    meta.ino(),
                    meta.mtime_nsec(),
                    meta.mtime(),
                    meta.blocks()
                ));
            } else {
                once.insert(meta.ino(), file);
            }
        }
        disks.sort();
        let summed = std::process::Command::new("sha256sum").args(once.values()).output()?;
        ensure!(summed.status.success(), "{}", String::from_utf8_lossy(&summed.stderr));
        let lines = String::from_utf8_lossy(&summed.stdout).lines().map(str::to_owned).collect::<Vec<_>>();
        Ok([disks, lines].concat())
    }
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() { collect(&entry.path(), files)? } else { files.push(entry.path()) }
    }
    Ok(())
}
