//! The clocks of a copy: the wall clock is right, and timers fire correctly.

use super::clones_services as services;
use crate::{World, patience, sandbox::Sandbox, within};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use keiki_client::Tcp;
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const CLOCK: &str = include_str!("../../guest/clock.py");
/// Maximum error of a wall clock.
const MOST_OFF: f64 = 0.05;
/// Round trips longer than this are ignored.
const MOST_ROUND: f64 = 0.05;
const ASKED: usize = 200;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|since| since.as_secs_f64()).unwrap_or_default()
}

/// Difference between a copy's wall clock and ours, and its uncertainty, in seconds; from the
/// fastest of many round trips.
async fn offset(copy: &Sandbox) -> Result<(f64, f64)> {
    let mut tcp = copy.client.tcp(copy.id, 7100).await?;
    let mut best = (0.0, f64::MAX);
    for _ in 0..ASKED {
        let asked = now();
        let there = ask(&mut tcp).await?;
        let round = now() - asked;
        if round / 2.0 < best.1 {
            best = (there - (asked + round / 2.0), round / 2.0);
        }
    }
    Ok(best)
}

async fn ask(tcp: &mut Tcp) -> Result<f64> {
    tcp.input.send(Bytes::from_static(b"?")).await?;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        line.extend(tcp.output.next().await?.context("the guest hung up")?);
    }
    let nanos: u64 = String::from_utf8(line)?.trim().parse()?;
    Ok(Duration::from_nanos(nanos).as_secs_f64())
}

/// First of all: a clock that is corrected later would be wrong until then.
async fn is_right(name: &str, copy: &Sandbox) -> Result<()> {
    let (off, sure) = offset(copy).await?;
    println!("        {name}: the clock is {:.1} ms off, to {:.1} ms", off * 1e3, sure * 1e3);
    ensure!(sure < MOST_ROUND * f64::from(patience()), "{name}: a question takes {:.0} ms", sure * 2e3);
    ensure!(
        off.abs() - sure < MOST_OFF * f64::from(patience()),
        "{name}: the clock is {off:.3} s off, to {sure:.3} s"
    );
    Ok(())
}

/// On four processors. A machine whose clock is set years back or ahead before the freeze stands
/// for one frozen then.
pub async fn clocks_are_right_and_timers_fire(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = services::create(client).await?;
    ensure!(parent.view().await?.cpu == 4, "not four processors");
    client.write_bytes(parent.id, "/root/clock.py", None, CLOCK).await?;
    // Twenty processors that look all the time are more than a slow host has.
    let every = 0.001 * f64::from(patience()).powi(3);
    let mut copies = Vec::new();
    for (name, shift) in [("three years old", -1095.0), ("of tomorrow", 1.0)] {
        let then = now() + shift * 86400.0;
        parent.sh(&format!("pkill python3; rm -f /dev/shm/*; date -s @{then:.0}")).await?;
        parent.background(&format!("exec python3 /root/clock.py {every}")).await?;
        parent
            .sh("for i in $(seq 100); do [ -e /dev/shm/armed ] && exit 0; sleep 0.05; done; exit 1")
            .await?;
        let snapshot = parent.snapshot().await?;
        copies.push((format!("a restored one, {name}"), Sandbox::restore(client, &snapshot).await?));
        let (restored, copy) = copies.last().context("none")?;
        is_right(restored, copy).await?;
        copies.push((format!("a fork, {name}"), parent.fork_one().await?));
        let (name, copy) = copies.last().context("none")?;
        is_right(name, copy).await?;
    }
    client.hibernate(parent.id).await?;
    client.wake(parent.id).await?;
    copies.push(("one that woke".into(), parent));
    let (name, copy) = copies.last().context("none")?;
    is_right(name, copy).await?;
    for (name, copy) in &copies {
        runs_on(name, copy).await.with_context(|| name.clone())?;
    }
    Ok(())
}

/// Timers set before the freeze fire, each once and not early; no clock goes back, no processor
/// stops.
async fn runs_on(name: &str, copy: &Sandbox) -> Result<()> {
    let is_old = name.contains("years old");
    let wait = format!(
        "for i in $(seq {}); do [ $(cat /dev/shm/fired | wc -l) -ge {} ] && break; sleep 0.1; done 2>/dev/null; cat /dev/shm/fired",
        within(30).as_secs() * 10,
        if is_old { 4 } else { 3 },
    );
    let text = copy.sh(&wait).await?;
    for timer in ["sleep", "timerfd", "alarm"] {
        let fired: Vec<f64> =
            text.lines().filter_map(|line| line.strip_prefix(timer)?.trim().parse().ok()).collect();
        ensure!(fired.len() == 1, "{timer} fired {} times: {text}", fired.len());
        // By the monotonic clock, which stops with the machine. A lost timer would be late.
        ensure!(
            fired[0] > 3.99 && fired[0] < 4.0 + within(10).as_secs_f64(),
            "{timer} fired after {} s, not 4",
            fired[0]
        );
    }
    ensure!(text.contains("at ") == is_old, "a moment of the wall clock: {text}");
    let back = copy.sh("cat /dev/shm/back 2>/dev/null; true").await?;
    ensure!(back.is_empty(), "the monotonic clock went back: {back}");
    let gap: f64 = copy.sh("cat /dev/shm/gap").await?.parse()?;
    // On a busy host a processor waits some seconds at most; one that stalled does not come back.
    ensure!(gap < within(10).as_secs_f64(), "a processor stood still for {gap} s");
    let said = copy.sh("dmesg | grep -iwE 'stalls?|stalled|lockup|unstable|hung' || true").await?;
    ensure!(said.is_empty(), "the kernel complains: {said}");
    Ok(())
}
