//! Common servers in a sandbox that is copied: SSH, Redis, a name server's cache.

use super::templates;
use crate::{World, long, names, sandbox::Sandbox, within};
use anyhow::{Context, Result, ensure};
use keiki_client::Client;
use keiki_types::api::BuildTemplate;
use std::{collections::BTreeSet, sync::Arc};

const NAME: &str = "services";
const TALK: &str = include_str!("../../guest/talk.py");
const DNS: &str = include_str!("../../guest/dns.py");

/// A sandbox of that template, which is built first if it does not exist.
pub async fn create(client: &Client) -> Result<Sandbox> {
    templates::build(client, &BuildTemplate { name: NAME.into(), ..BuildTemplate::default() }).await?;
    templates::create(client, NAME).await
}

/// Runs a shell line until it succeeds.
async fn until(sandbox: &Sandbox, seconds: u64, line: &str) -> Result<()> {
    let tries = within(seconds).as_secs() * 10;
    let wait = format!(
        "for i in $(seq {tries}); do {{ {line}; }} >/dev/null 2>&1 && exit 0; sleep 0.1; done; exit 1"
    );
    sandbox.sh(&wait).await.map(drop)
}

/// Connections inside the guest all continue, in every copy.
async fn talks_on(name: &str, sandbox: &Sandbox) -> Result<()> {
    let before = sandbox.sh("cat /dev/shm/talked").await?;
    let more = "[ \"$(cut -d' ' -f3 /dev/shm/talked)\" -gt $(($(cat /dev/shm/was) + 5)) ]";
    sandbox.sh("cut -d' ' -f3 /dev/shm/talked >/dev/shm/was").await?;
    let goes_on = until(sandbox, 20, more).await;
    let ended = sandbox.sh("cat /dev/shm/ended 2>/dev/null; true").await?;
    ensure!(goes_on.is_ok() && ended.is_empty(), "{name}: {before}, and then nothing: {ended}");
    Ok(())
}

pub async fn what_talks_inside_talks_on(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = create(client).await?;
    client.write_bytes(parent.id, "/root/talk.py", None, TALK).await?;
    parent
        .sh("redis-server --daemonize yes --dir /tmp --appendonly yes --unixsocket /run/redis.sock >/dev/null")
        .await?;
    until(&parent, 20, "redis-cli ping && [ -S /run/redis.sock ]").await?;
    parent.background("exec python3 /root/talk.py").await?;
    until(&parent, 20, "[ -s /dev/shm/talked ]").await?;
    let snapshot = parent.snapshot().await?;
    let child = parent.fork_one().await?;
    for (name, copy) in [
        ("the original", &parent),
        ("a fork", &child),
        ("a fork of the fork", &child.fork_one().await?),
        ("a restored one", &Sandbox::restore(client, &snapshot).await?),
    ] {
        talks_on(name, copy).await?;
        // Each has its own server.
        let (key, value) = ("owner", name.replace(' ', "-"));
        ensure!(copy.sh(&format!("redis-cli exists {key}")).await? == "0", "{name}: has a copy's value");
        copy.sh(&format!("redis-cli set {key} {value}; redis-cli bgrewriteaof")).await?;
    }
    let slot = child.view().await?.guest_ip;
    client.hibernate(child.id).await?;
    let _others = [Sandbox::create(client).await?, Sandbox::create(client).await?];
    client.wake(child.id).await?;
    ensure!(child.view().await?.guest_ip != slot, "it woke where it was: nothing was tried");
    talks_on("a fork that woke in another slot", &child).await?;
    ensure!(child.sh("redis-cli get owner").await? == "a-fork", "it lost a value");
    Ok(())
}

pub async fn names_and_neighbours_of_another_slot_are_forgotten(world: Arc<World>) -> Result<()> {
    const ASK: &str = "python3 /root/dns.py named.keiki.test";
    const KNOWN: &str = "awk 'NR > 1 && $3 == \"0x2\"' /proc/net/arp | wc -l";
    let client = &world.node.client;
    let parent = create(client).await?;
    client.write_bytes(parent.id, "/root/dns.py", None, DNS).await?;
    let server =
        "dnsmasq --user=root --no-resolv --server=172.31.255.1 --listen-address=127.0.0.1 --bind-interfaces";
    parent.sh(server).await?;
    until(&parent, 20, ASK).await?;
    let address = names::ADDRESS.map(|byte| byte.to_string()).join(".");
    let first = parent.sh(ASK).await?;
    ensure!(first.starts_with(&address), "{first}");
    ensure!(parent.sh(ASK).await? == first, "it keeps no answers: nothing is tried");
    ensure!(parent.sh(KNOWN).await? == "1", "no neighbour is known: nothing is tried");
    let misses = |answer: &str| -> Result<u64> { Ok(answer.rsplit(' ').next().unwrap_or_default().parse()?) };
    let child = parent.fork_one().await?;
    ensure!(child.sh(KNOWN).await? == "0", "a copy knows a neighbour of its original's");
    ensure!(parent.sh(KNOWN).await? == "1", "the original forgot its neighbour");
    let asked = child.sh(ASK).await?;
    ensure!(
        asked.starts_with(&address) && misses(&asked)? > misses(&first)?,
        "a copy trusts an old answer: {asked}"
    );
    ensure!(parent.sh(ASK).await? == first, "the original forgot its answers");
    client.hibernate(child.id).await?;
    let woken = child.sh(&format!("{KNOWN}; {ASK}")).await?;
    ensure!(woken.starts_with("0\n") && misses(&woken)? > misses(&asked)?, "one that woke: {woken}");
    Ok(())
}

/// The keys that an SSH client sees, not the server's files. A restarting server is gone for a
/// while.
async fn shown(sandbox: &Sandbox) -> Result<BTreeSet<String>> {
    const SCAN: &str = "ssh-keyscan 127.0.0.1 2>/dev/null | sort -u >/tmp/keys; \
        grep -q ed25519 /tmp/keys && grep -q ecdsa /tmp/keys";
    until(sandbox, 20, SCAN).await?;
    Ok(sandbox.sh("cat /tmp/keys").await?.lines().map(str::to_owned).collect())
}

/// RSA keys take long: a copy generates them after the release, and a copy of that copy is taken
/// meanwhile.
pub async fn ssh_servers_of_copies_have_keys_of_their_own(world: Arc<World>) -> Result<()> {
    const HALF: &str = "pgrep -x ssh-keygen";
    let client = &world.node.client;
    let parent = create(client).await?;
    // A small RSA key: only its existence matters.
    let prepare = "cd /etc/ssh && for t in ed25519 ecdsa rsa; do ssh-keygen -q -t $t $([ $t = rsa ] && echo -b 1024) \
        -N '' -f ssh_host_${t}_key; done && mkdir -p /run/sshd && /usr/sbin/sshd -o RequiredRSASize=1024";
    parent.sh(prepare).await?;
    let first = shown(&parent).await?;
    ensure!(first.len() >= 2, "{first:?}");
    let child = parent.fork_one().await?;
    let half = child.sh(HALF).await.context("its key is made already: nothing is tried")?;
    let mut copies = child.fork(2).await?;
    for copy in &copies {
        let now = copy.sh(&format!("{HALF} || true")).await?;
        ensure!(now != half, "a copy goes on with a key that its original makes");
    }
    copies.push(child);
    let quick =
        |keys: &BTreeSet<String>| keys.iter().filter(|key| !key.contains("ssh-rsa")).cloned().collect();
    let mut seen: BTreeSet<String> = quick(&first);
    let kinds = seen.len();
    for copy in &copies {
        // As soon as it is released.
        seen.extend(quick(&shown(copy).await?));
    }
    ensure!(seen.len() == kinds * 4, "two copies show one key: {seen:?}");
    // It takes minutes.
    let wanted = if long() { copies.len() } else { 0 };
    let mut rsa = BTreeSet::new();
    for copy in &copies[..wanted] {
        until(copy, 200, "ssh-keyscan -t rsa 127.0.0.1 | grep -q ssh-rsa").await?;
        rsa.extend(shown(copy).await?.into_iter().filter(|key| key.contains("ssh-rsa")));
    }
    ensure!(rsa.len() == wanted, "two copies show one key of RSA: {rsa:?}");
    let kept = copies.last().context("none")?;
    let before = quick(&shown(kept).await?);
    client.hibernate(kept.id).await?;
    let after: BTreeSet<String> = quick(&shown(kept).await?);
    ensure!(after == before, "a wake changed its keys");
    Ok(())
}
