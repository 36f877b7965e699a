//! Every verb, every failure of its steps, two verbs at once, and what a later node finds.

use super::Host;
use crate::{Node, records::SandboxRecord, store::Store};
use anyhow::{Context, Result, ensure};
use keiki_api::{Host as _, Sandboxes as _, Templates as _};
use keiki_engine::fake::Call;
use keiki_types::{
    SandboxId, Status,
    api::{CreateSandbox, ForkSandbox, Sandbox},
};
use std::{collections::BTreeMap, time::Duration};

async fn create(node: &Node) -> Result<Sandbox> {
    Ok(node.create(CreateSandbox::default(), None).await?)
}

async fn fork(node: &Node, id: SandboxId, count: i64) -> Result<Vec<Sandbox>> {
    let request = ForkSandbox { count: Some(count), ..ForkSandbox::default() };
    Ok(node.fork(id, request, BTreeMap::new(), None).await?.children)
}

/// Runs a verb by its name.
async fn run(node: &Node, verb: &str, id: SandboxId) -> Result<()> {
    match verb {
        "create" => drop(create(node).await?),
        "fork" => drop(fork(node, id, 3).await?),
        "snapshot" => drop(node.snapshot(id, None).await?),
        "restore" => {
            let snapshot = node.snapshot(id, None).await?.id;
            let request =
                CreateSandbox { from_snapshot: Some(snapshot.to_string()), ..CreateSandbox::default() };
            drop(node.create(request, None).await?);
        }
        "pause" => drop(node.pause(id).await?),
        "resume" => drop(node.resume(id).await?),
        "hibernate" => drop(node.hibernate(id).await?),
        "wake" => drop(node.wake(id).await?),
        "delete" => node.delete(id).await?,
        other => anyhow::bail!("no verb {other}"),
    }
    Ok(())
}

/// Nothing is promised, made or recorded but what the listed sandboxes need.
async fn nothing_is_left(host: &Host, node: &Node) -> Result<()> {
    let all = node.list(false).await?;
    let alive = |one: &&Sandbox| matches!(one.status, Status::Running | Status::Paused);
    let live = all.iter().filter(alive).count();
    let records = node.inner.journal.records.count::<SandboxRecord>().await?;
    ensure!(records == all.len(), "{records} records of {} sandboxes", all.len());
    ensure!(host.engine.running().len() == live, "machines: {:?}", host.engine.running());
    ensure!(host.entries("sandboxes")? == live, "directories of machines");
    ensure!(host.used.lock().len() == live, "slots: {:?}", host.used.lock());
    ensure!(host.entries("scratch")? == 0, "scratch");
    let hibernated = all.iter().filter(|one| one.status == Status::Hibernated).count();
    ensure!(host.entries("hibernated")? == hibernated, "hibernated");
    ensure!(host.entries("snapshots")? == node.snapshots(None).await?.len(), "snapshots");
    let fleet = &node.inner.fleet;
    ensure!(fleet.room.reserved() == 0, "disk is promised");
    let is_promised = fleet.admission.used_bytes() > 0;
    ensure!(is_promised == (live > 0), "{live} machines, RAM is promised: {is_promised}");
    Ok(())
}

#[tokio::test]
async fn a_fork_freezes_once_in_order_and_thaws_all() -> Result<()> {
    let host = Host::new().await?;
    let node = host.start().await?;
    let parent = create(&node).await?.id;
    host.agents.take_asked();
    let children = fork(&node, parent, 3).await?;
    let asked = host.agents.take_asked();
    ensure!(asked[..3] == ["Flush", "FreezeUser", "ThawUser"], "{asked:?}");
    let calls = host.engine.calls();
    let of = |call: Call| calls.iter().filter(|one| **one == call).count();
    // One more of each kind: the template's own freeze, and the parent.
    ensure!((of(Call::Freeze), of(Call::Prepare), of(Call::Thaw)) == (2, 4, 4), "{calls:?}");
    let (last_prepare, freeze) =
        (calls.iter().rposition(|c| *c == Call::Prepare), calls.iter().rposition(|c| *c == Call::Freeze));
    ensure!(last_prepare < freeze, "VMs are prepared while the parent runs: {calls:?}");
    for child in &children {
        let timings = child.timings.as_ref().context("no times")?;
        let sum = timings.thaw_ms.unwrap_or(0.0) + timings.release_ms.unwrap_or(0.0);
        ensure!((sum - timings.total_ms).abs() < 0.01 && timings.vcpu_pause_ms.is_some(), "{timings:?}");
        ensure!(timings.steps.iter().any(|step| step.name == "individualize"), "{timings:?}");
    }
    nothing_is_left(&host, &node).await
}

#[tokio::test]
async fn gauges_show_the_moment() -> Result<()> {
    let host = Host::new().await?;
    let node = host.start().await?;
    for running in [1, 2] {
        create(&node).await?;
        let text = node.metrics().await?;
        let count = |of: &str| text.lines().filter(|line| line.starts_with(of)).count();
        ensure!(count("keiki_sandboxes{") == Status::ALL.len(), "{text}");
        for line in [
            &format!(r#"keiki_sandboxes{{state="running"}} {running}"#),
            r#"keiki_prestarted_machines{template="base"} 0"#,
            "keiki_memory_limit_bytes 68719476736",
            &format!("keiki_slots_used {running}"),
        ] {
            ensure!(text.lines().any(|written| written == line), "{line}: {text}");
        }
        ensure!(count("process_cpu_seconds_total ") == 1, "{text}");
    }
    Ok(())
}

#[tokio::test]
async fn whatever_the_engine_fails_at_nothing_is_left_and_it_works_again() -> Result<()> {
    let host = Host::new().await?;
    let node = host.start().await?;
    let failures = [
        ("create", "", vec![(Call::Prepare, 0), (Call::Thaw, 0)]),
        (
            "fork",
            "",
            vec![
                (Call::Image, 0),
                (Call::Prepare, 0),
                (Call::Prepare, 2),
                (Call::Freeze, 0),
                (Call::Thaw, 0),
                (Call::Thaw, 2),
            ],
        ),
        ("snapshot", "", vec![(Call::Image, 0), (Call::Freeze, 0), (Call::Persist, 0)]),
        ("restore", "", vec![(Call::Load, 0), (Call::Prepare, 0), (Call::Thaw, 0)]),
        ("pause", "", vec![(Call::Pause, 0)]),
        ("resume", "pause", vec![(Call::Resume, 0)]),
        ("hibernate", "", vec![(Call::Image, 0), (Call::Freeze, 0), (Call::Persist, 0)]),
        ("wake", "hibernate", vec![(Call::Load, 0), (Call::Prepare, 0), (Call::Thaw, 0)]),
        ("fork", "hibernate", vec![(Call::Load, 0)]),
    ];
    for (verb, before, calls) in failures {
        let id = create(&node).await?.id;
        if !before.is_empty() {
            run(&node, before, id).await?;
        }
        for (call, after) in calls {
            let status = node.get(id).await?.status;
            host.engine.fail(call, after);
            let failed = run(&node, verb, id).await;
            ensure!(failed.is_err(), "{verb} with a failure at {call:?} {after}");
            ensure!(node.get(id).await?.status == status, "{verb} changed it at {call:?}");
            nothing_is_left(&host, &node).await.with_context(|| format!("{verb} at {call:?} {after}"))?;
        }
        run(&node, verb, id).await.with_context(|| format!("{verb} afterwards"))?;
        nothing_is_left(&host, &node).await?;
    }
    Ok(())
}

#[tokio::test]
async fn whatever_a_guest_refuses_nothing_is_left_and_its_processes_go_on() -> Result<()> {
    let host = Host::new().await?;
    let node = host.start().await?;
    let id = create(&node).await?.id;
    for (verb, refused) in [
        ("create", "AssumeIdentity"),
        ("fork", "Flush"),
        ("fork", "FreezeUser"),
        ("fork", "AssumeIdentity"),
        ("snapshot", "Flush"),
        ("snapshot", "FreezeUser"),
        ("pause", "FreezeUser"),
        ("hibernate", "FreezeUser"),
    ] {
        host.agents.take_asked();
        host.agents.refuse(refused);
        ensure!(run(&node, verb, id).await.is_err(), "{verb} although {refused} was refused");
        let asked = host.agents.take_asked();
        let count = |what: &str| asked.iter().filter(|one| *one == what).count();
        if refused == "AssumeIdentity" && verb == "fork" {
            ensure!(count("ThawUser") == 3, "the parent and two of three children: {asked:?}");
        }
        ensure!(node.get(id).await?.status == Status::Running, "{verb}, {refused}");
        nothing_is_left(&host, &node).await.with_context(|| format!("{verb}, {refused}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn two_verbs_at_once_are_one_after_the_other() -> Result<()> {
    const VERBS: [&str; 7] = ["fork", "snapshot", "pause", "resume", "hibernate", "wake", "delete"];
    let host = Host::new().await?;
    let node = host.start().await?;
    for call in [Call::Freeze, Call::Thaw, Call::Pause, Call::Persist] {
        host.engine.delay(call, Duration::from_millis(1));
    }
    for first in VERBS {
        for second in VERBS {
            let id = create(&node).await?.id;
            let done = futures::future::join(run(&node, first, id), run(&node, second, id)).await;
            nothing_is_left(&host, &node).await.with_context(|| format!("{first} and {second}: {done:?}"))?;
            let is_deleted = first == "delete" || second == "delete";
            ensure!(is_deleted == node.get(id).await.is_err(), "{first} and {second}: {done:?}");
            for rest in node.list(false).await? {
                node.delete(rest.id).await?;
            }
        }
    }
    nothing_is_left(&host, &node).await
}

/// A node dies with its machines running; another comes after it.
async fn again(host: &mut Host, node: Node) -> Result<Node> {
    node.inner.journal.events.flush().await;
    drop(node);
    host.engine = host.engine.restarted();
    // The sweeper and the watchers let go of what they look at.
    tokio::time::sleep(Duration::from_millis(20)).await;
    host.start().await
}

#[tokio::test]
async fn a_later_node_finds_what_is_recorded_and_removes_the_rest() -> Result<()> {
    let mut host = Host::new().await?;
    let node = host.start().await?;
    let [running, paused, hibernated, lost] =
        [create(&node).await?.id, create(&node).await?.id, create(&node).await?.id, create(&node).await?.id];
    node.pause(paused).await?;
    node.hibernate(hibernated).await?;
    // A create that was cut short.
    let half = SandboxRecord {
        id: SandboxId::new(),
        status: Status::Creating,
        ..node.inner.sandboxes.get(running)?.record()
    };
    node.inner.journal.records.put(vec![half.clone()]).await?;
    let store: Store = node.inner.store.clone();
    std::fs::create_dir_all(store.sandbox(half.id))?;
    std::fs::create_dir_all(store.sandbox(SandboxId::new()))?;
    std::fs::create_dir_all(store.scratch())?;
    let lost_dir = store.sandbox(lost);
    drop(store);
    // The first node must not see that a machine ends.
    drop(node);
    let engine = host.engine.clone();
    ensure!(engine.end(&lost_dir, "its guest panicked"), "it ran");
    host.engine = engine.restarted();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let node = host.start().await?;
    let status = async |id| anyhow::Ok(node.get(id).await?.status);
    ensure!(status(running).await? == Status::Running);
    ensure!(status(paused).await? == Status::Paused);
    ensure!(status(hibernated).await? == Status::Hibernated);
    ensure!(status(lost).await? == Status::Failed);
    ensure!(node.get(half.id).await.is_err(), "it is half-made");
    node.delete(lost).await?;
    nothing_is_left(&host, &node).await?;
    node.resume(paused).await?;
    node.wake(hibernated).await?;
    fork(&node, running, 2).await?;
    nothing_is_left(&host, &node).await
}

#[tokio::test]
async fn a_template_of_an_earlier_version_scheme_is_used_as_it_is_recorded() -> Result<()> {
    let mut host = Host::new().await?;
    let node = host.start().await?;
    let node = again(&mut host, node).await?;
    let template = node.get_template(&"base".parse()?).await?;
    ensure!(
        (template.version.as_str(), template.status.as_str()) == (super::VERSION, "ready"),
        "{template:?}"
    );
    ensure!(create(&node).await?.template_version == super::VERSION);
    Ok(())
}
