//! Many callers at once.
//!
//! Two questions, asked apart, because on few CPUs the first would only measure the second:
//!
//! 1. *Does one slow command delay another sandbox?* 31 clients hold what is slow (commands that
//!    sleep, output that without a reader, an upload that stops, events that are followed), on
//!    other sandboxes; meanwhile the 32nd runs `ls` in another sandbox, one after the other. All
//!    wait for something other than the CPU, so what `ls` takes longer than alone is queueing in
//!    the node.
//! 2. *Does it hold under load?* 32 clients do whatever comes next as fast as they can: commands,
//!    files, forks, creates. Guests under software emulation fill the CPUs; times are printed, not
//!    judged. Every response must be one that the API documents, and afterwards nothing may be
//!    left.

use super::observe::{metric, metrics};
use crate::{World, node::Node, patience, sandbox::Sandbox};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::{StreamExt, future::try_join_all, stream};
use keiki_client::Client;
use keiki_types::{
    SandboxId,
    api::{CreateSandbox, ExecRequest, ForkSandbox},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

const CLIENTS: usize = 32;
/// Sandboxes that they share.
const SANDBOXES: usize = 8;
/// Limit for the 99th percentile of `ls` on an otherwise idle machine.
const P99: Duration = Duration::from_millis(50);
/// Samples of `ls` per figure.
const LOOKS: usize = 200;

pub async fn a_slow_command_delays_no_other_sandbox(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let probe = Sandbox::create(client).await?;
    let alone = p99_of_ls(&probe).await?;
    let others = try_join_all((0..4).map(|_| Sandbox::create(client))).await?;
    let mut slow = JoinSet::new();
    for n in 0..CLIENTS - 1 {
        let sandbox = others[n % others.len()].clone();
        slow.spawn(async move { hold(n, &sandbox).await });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    stand_still(&others).await?;
    if let Some(ended) = slow.try_join_next() {
        ended??;
        anyhow::bail!("something slow ended at once");
    }
    let beside = p99_of_ls(&probe).await?;
    println!("        ls, 99 of 100: {alone:.1?} alone, {beside:.1?} beside {} slow requests", CLIENTS - 1);
    slow.shutdown().await;
    // On a busy machine, compare with the time it takes alone.
    ensure!(
        beside <= P99.max(alone * 2) * patience(),
        "ls takes {beside:?} beside slow commands, {alone:?} alone"
    );
    Ok(())
}

/// Waits until all slow requests wait for something. Unread output first fills the buffers, and on
/// few CPUs under emulation the test would measure that instead.
async fn stand_still(sandboxes: &[Sandbox]) -> Result<()> {
    let mut before = u64::MAX;
    for _ in 0..60 * patience() {
        let views = try_join_all(sandboxes.iter().map(Sandbox::view)).await?;
        let used: u64 = views.iter().filter_map(|view| view.cpu_ms).sum();
        // An idle guest still ticks.
        if before != u64::MAX && used - before < 200 * u64::from(patience()) {
            return Ok(());
        }
        before = used;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    anyhow::bail!("what is slow never waits")
}

async fn p99_of_ls(probe: &Sandbox) -> Result<Duration> {
    let mut took = Vec::with_capacity(LOOKS);
    for _ in 0..LOOKS {
        let begun = Instant::now();
        probe.sh("ls /").await?;
        took.push(begun.elapsed());
    }
    took.sort();
    Ok(percentile(&took, 99))
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or_default()
}

/// Something slow, until it is dropped.
async fn hold(n: usize, sandbox: &Sandbox) -> Result<()> {
    let (client, id) = (&sandbox.client, sandbox.id);
    match n % 4 {
        0 => sandbox.sh("sleep 600").await.map(drop),
        1 => {
            // As fast as it can: it waits once the buffers are full.
            let line = "yes 0123456789012345678901234567890123456789";
            let request = ExecRequest { cmd: Some(line.into()), ..ExecRequest::default() };
            let _unread = client.exec_stream(id, &request).await?;
            std::future::pending().await
        }
        2 => {
            let stuck = stream::iter([Ok(Bytes::from_static(b"begun"))]).chain(stream::pending());
            Ok(client.write_file(id, &format!("/tmp/stuck{n}"), None, stuck).await.map(drop)?)
        }
        _ => {
            let mut events = client.follow_events(Some(id), None).await?;
            while let Some(event) = events.next().await {
                event?;
            }
            Ok(())
        }
    }
}

/// How often each request was made, and how long it took.
#[derive(Default)]
struct Figures(Mutex<BTreeMap<&'static str, Vec<Duration>>>);

impl Figures {
    fn add(&self, what: &'static str, took: Duration) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).entry(what).or_default().push(took);
    }

    fn tell(&self) -> usize {
        let mut all = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for (what, took) in all.iter_mut() {
            took.sort();
            let (count, half, most) = (took.len(), percentile(took, 50), percentile(took, 99));
            println!("        {count:6} {what}: half within {half:.0?}, 99 of 100 within {most:.0?}");
        }
        all.values().map(Vec::len).sum()
    }
}

pub async fn thirty_two_clients_and_nothing_is_left(world: Arc<World>) -> Result<()> {
    let long = crate::long();
    let half = Duration::from_secs(if long { 300 } else { 30 });
    let node = &world.node;
    // VMs prepared ahead, for each template that earlier tests built.
    settle(node).await?;
    let rest = at_rest(node)?;
    // The first half fills caches, connections and free heap. Growth in the second half is a leak.
    everybody_works(node, half).await?;
    let before = metrics(node).await?;
    everybody_works(node, half).await?;
    let after = metrics(node).await?;
    // Descriptors of connections that idle and threads that wait for work come and go. The heap at
    // rest grows by one thing alone: pages of the events that were written stay in their database's
    // cache until that has 2 MB. What else each of a thousand requests leaves in it shows. Beside
    // it the resident memory has what the heap keeps in fragments.
    for (name, slack) in [
        ("process_open_fds", 64.0),
        ("process_threads", 64.0),
        ("keiki_slots_used", 0.0),
        ("keiki_store_reserved_bytes", 0.0),
        ("keiki_memory_admitted_bytes", 0.0),
        ("keiki_heap_used_bytes", f64::from(2 << 20)),
        ("process_resident_memory_bytes", f64::from(24 << 20)),
    ] {
        let value = |text: &str| metric(text, name).with_context(|| format!("{name} is missing"));
        let (was, is) = (value(&before)?, value(&after)?);
        println!("        {name}: {was} half way, {is} after");
        ensure!(is <= was + slack, "{name} was {was} half way and is {is} after");
    }
    let left = at_rest(node)?;
    ensure!(left == rest, "monitors, machines and mounts: {rest:?} before, {left:?} after");
    let failed = r#"status="500""#;
    let failures: Vec<_> =
        after.lines().filter(|line| line.contains(failed) && !before.contains(line)).collect();
    ensure!(failures.is_empty(), "the node failed: {failures:?}");
    Ok(())
}

/// Runs all clients for a while; afterwards everything they created is deleted, and the node is
/// idle.
async fn everybody_works(node: &Node, how_long: Duration) -> Result<()> {
    let cpu = metric(&metrics(node).await?, "process_cpu_seconds_total").context("no CPU time")?;
    let until = Instant::now() + how_long;
    let shared = try_join_all((0..SANDBOXES).map(|_| Sandbox::create(&node.client))).await?;
    let figures = Arc::new(Figures::default());
    let clients = (0..CLIENTS).map(|n| {
        let (sandbox, figures) = (shared[n % SANDBOXES].clone(), Arc::clone(&figures));
        // Private connections, as a separate client has.
        let client = Client::new(node.client.url());
        tokio::spawn(async move {
            let sandbox = Sandbox { client: client?, id: sandbox.id };
            let mut turn = n;
            while Instant::now() < until {
                let begun = Instant::now();
                let what =
                    work(turn, n, &sandbox).await.with_context(|| format!("client {n}, turn {turn}"))?;
                figures.add(what, begun.elapsed());
                turn += 1;
            }
            anyhow::Ok(())
        })
    });
    for done in try_join_all(clients).await? {
        done?;
    }
    let done = figures.tell();
    let cpu = metric(&metrics(node).await?, "process_cpu_seconds_total").context("no CPU time")? - cpu;
    println!("        the node itself used {cpu:.1} s of CPU in {:.0} s", how_long.as_secs_f64());
    ensure!(done * patience() as usize > CLIENTS * 4, "only {done} requests in all");
    node.delete_all().await;
    settle(node).await
}

/// Monitors, directories of machines, mounts.
fn at_rest(node: &Node) -> Result<[usize; 3]> {
    let traces = node.traces()?;
    Ok([traces.monitors.len(), traces.sandboxes, traces.mounts])
}

/// Waits until the node is idle: as many slots and prepared VMs as at rest.
async fn settle(node: &Node) -> Result<()> {
    let mut last = String::new();
    for _ in 0..60 * patience() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let text = metrics(node).await?;
        let names = [
            "keiki_slots_used",
            "keiki_slots_ready",
            r#"keiki_prestarted_machines{template="base"}"#,
            "process_open_fds",
        ];
        let now = format!("{:?}", names.map(|name| metric(&text, name)));
        if now == last && metric(&text, names[2]) == Some(2.0) && metric(&text, names[1]) >= Some(8.0) {
            return Ok(());
        }
        last = now;
    }
    anyhow::bail!("the node does not come to rest: {last}")
}

/// One random request; returns its name.
async fn work(turn: usize, n: usize, sandbox: &Sandbox) -> Result<&'static str> {
    let (client, id) = (&sandbox.client, sandbox.id);
    Ok(match turn * 7 % 20 {
        0 => {
            let children = client.fork(id, &ForkSandbox::default()).await?.children;
            let child = children.first().context("no child")?.id;
            ls(client, child).await?;
            client.delete(child).await?;
            "fork, ls, delete"
        }
        1 => {
            let made = client.create(&CreateSandbox::default()).await?;
            ls(client, made.id).await?;
            client.delete(made.id).await?;
            "create, ls, delete"
        }
        2..=5 => {
            let path = format!("/tmp/file{n}");
            let data = Bytes::from(format!("{turn} ").repeat(10_000));
            client.write_bytes(id, &path, None, data.clone()).await?;
            let mut read = client.read_file(id, &path).await?;
            let mut whole = Vec::new();
            while let Some(piece) = read.chunks.next().await {
                whole.extend_from_slice(&piece?);
            }
            ensure!(whole == data, "a file came back otherwise");
            "write and read a file"
        }
        6 => {
            client.sandbox(id).await?;
            client.events(Some(id), None, None).await?;
            "get, events"
        }
        7 => {
            let request = ExecRequest { cmd: Some("sleep 1; echo slow".into()), ..ExecRequest::default() };
            ensure!(client.exec(id, &request).await?.stdout == "slow\n", "a slow command");
            "sleep 1"
        }
        _ => {
            ls(client, id).await?;
            "ls"
        }
    })
}

async fn ls(client: &Client, id: SandboxId) -> Result<()> {
    let request = ExecRequest { cmd: Some("ls /".into()), ..ExecRequest::default() };
    let done = client.exec(id, &request).await?;
    ensure!(done.exit_code == 0 && done.stdout.contains("usr\n"), "{done:?}");
    Ok(())
}
