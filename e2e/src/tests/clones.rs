//! A clone is safe to use: what it does not share with its original, and what hooks may decide.

use crate::{World, sandbox::Sandbox, within};
use anyhow::{Context, Result, ensure};
use keiki_client::Client;
use keiki_types::{
    Status,
    api::{
        CreateSandbox, ForkSandbox,
        secrets::{Fate, Secret},
    },
};
use std::{collections::BTreeMap, sync::Arc};

pub async fn identity_is_new_in_copies_and_kept_by_a_wake(world: Arc<World>) -> Result<()> {
    const IDENTITY: &str =
        "cat /etc/machine-id; md5sum </var/lib/systemd/random-seed; ls /etc/dhcpcd.duid 2>/dev/null | wc -l";
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    let prepare = "mkdir -p /var/lib/systemd && head -c 512 /dev/urandom >/var/lib/systemd/random-seed && echo x >/etc/dhcpcd.duid";
    parent.sh(prepare).await?;
    let before = parent.sh(IDENTITY).await?;
    let told: u32 = parent.sh(TOLD).await?.parse()?;
    let snapshot = parent.snapshot().await?;
    let copies = [
        parent.fork_one().await?,
        Sandbox::restore(client, &snapshot).await?,
        Sandbox::create(client).await?,
    ];
    let mut ids = vec![before.lines().next().context("no machine ID")?.to_owned()];
    for (n, copy) in copies.iter().enumerate() {
        let line = if n == 2 { "cat /etc/machine-id" } else { IDENTITY };
        let text = copy.sh(line).await?;
        let lines: Vec<&str> = text.lines().collect();
        ids.push(lines[0].to_owned());
        if n < 2 {
            ensure!(lines[1] != before.lines().nth(1).unwrap_or_default(), "a copy has its original's seed");
            ensure!(lines[2] == "0", "a copy has its original's DHCP identifier");
            kernel_is_told(copy, told + 1).await?;
        }
    }
    ensure!(ids.iter().all(|id| id.len() == 32), "{ids:?}");
    ids.sort();
    ids.dedup();
    ensure!(ids.len() == 4, "two copies have the same machine ID");
    client.hibernate(parent.id).await?;
    ensure!(parent.sh(IDENTITY).await? == before, "a wake changed who the sandbox is");
    kernel_is_told(&parent, told + 1).await
}

/// How often the kernel received a new VM generation ID.
const TOLD: &str = "dmesg | grep -c 'crng reseeded due to virtual machine fork'";

/// The notification arrives a moment later.
async fn kernel_is_told(sandbox: &Sandbox, times: u32) -> Result<()> {
    let wait = format!("for i in $(seq 50); do [ $({TOLD}) -lt {times} ] || break; sleep 0.1; done; {TOLD}");
    let told = sandbox.sh(&wait).await?;
    ensure!(told == times.to_string(), "the kernel heard {told} times that it is a copy, not {times}");
    Ok(())
}

pub async fn hooks_run_in_each_copy_and_can_refuse_it(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    let hook = "mkdir -p /etc/keiki/thaw.d && cd /etc/keiki/thaw.d && \
        printf '#!/bin/sh\\nenv | grep ^KEIKI_ | sort >/dev/shm/hook\\n' >10-env && chmod +x 10-env";
    parent.sh(hook).await?;
    let child = parent.fork_one().await?;
    let said = child.sh("cat /dev/shm/hook").await?;
    let generation = child.view().await?.generation;
    for line in [
        format!("KEIKI_GENERATION={generation}"),
        "KEIKI_REASON=fork".to_owned(),
        format!("KEIKI_SANDBOX_ID={}", child.id),
        format!("KEIKI_PARENT_SANDBOX_ID={}", parent.id),
    ] {
        ensure!(said.lines().any(|said| said == line), "no {line} in: {said}");
    }
    client.hibernate(child.id).await?;
    ensure!(child.sh("grep REASON /dev/shm/hook").await? == "KEIKI_REASON=wake", "no hook ran at the wake");
    parent.sh("cd /etc/keiki/thaw.d && printf '#!/bin/sh\\necho no licence for copies >&2; exit 3\\n' >20-no && chmod +x 20-no").await?;
    let count = client.list(false).await?.len();
    let refused = parent.fork(2).await.err().context("a hook that fails was ignored")?;
    ensure!(
        format!("{refused:#}").contains("hook 20-no exited with 3: no licence for copies"),
        "{refused:#}"
    );
    ensure!(client.list(false).await?.len() == count, "a copy that was refused is still there");
    ensure!(parent.sh("echo fine").await? == "fine", "the original suffered");
    Ok(())
}

/// The slot's name server is the one peer outside that every guest may speak TCP with.
pub async fn connections_with_the_outside_are_reset_at_once(world: Arc<World>) -> Result<()> {
    const SCRIPT: &str = "import os, socket, threading, time
server = socket.create_server((\"127.0.0.1\", 7001))
def echo():
    peer, _ = server.accept()
    while data := peer.recv(100): peer.sendall(data)
threading.Thread(target=echo, daemon=True).start()
inside = socket.create_connection((\"127.0.0.1\", 7001))
outside = socket.create_connection((\"172.31.255.1\", 53))
def listen():
    try: end = repr(outside.recv(1))
    except OSError as error: end = type(error).__name__
    since = time.time() - os.stat(\"/run/keiki/generation\").st_mtime
    open(\"/dev/shm/outside\", \"w\").write(end + \" %f\" % since)
threading.Thread(target=listen, daemon=True).start()
n = 0
while True:
    inside.sendall(b\"x\")
    assert inside.recv(1) == b\"x\"
    n += 1
    # Never half there.
    with open(\"/dev/shm/next\", \"w\") as out: out.write(str(n))
    os.replace(\"/dev/shm/next\", \"/dev/shm/inside\")
    time.sleep(0.01)
";
    let parent = Sandbox::create(&world.node.client).await?;
    parent.client.write_bytes(parent.id, "/root/talk.py", None, SCRIPT).await?;
    parent.background("python3 /root/talk.py").await?;
    parent.sh("for i in $(seq 100); do [ -s /dev/shm/inside ] && exit 0; sleep 0.05; done; exit 1").await?;
    let child = parent.fork_one().await?;
    let end = child
        .sh("for i in $(seq 40); do [ -s /dev/shm/outside ] && break; sleep 0.05; done; cat /dev/shm/outside")
        .await?;
    ensure!(end.starts_with("ConnectionResetError"), "the copy's connection ended with {end:?}");
    // The generation is written just before user processes continue.
    let since: f64 = end.rsplit(' ').next().unwrap_or_default().parse()?;
    ensure!(since < within(1).as_secs_f64(), "it ended {since} s after the copy went on");
    let inside = "a=$(cat /dev/shm/inside); sleep 0.5; b=$(cat /dev/shm/inside); [ $b -gt $a ] && echo alive";
    ensure!(child.sh(inside).await? == "alive", "a connection inside the copy did not live on");
    let of_parent = parent.sh("cat /dev/shm/outside 2>/dev/null; true").await?;
    ensure!(!of_parent.contains("Reset"), "the original's connection was reset: {of_parent}");
    ensure!(parent.sh(inside).await? == "alive", "the original's connection inside did not live on");
    Ok(())
}

fn secret(value: &str, on_fork: Fate, on_restore: Fate) -> Secret {
    Secret { value: value.into(), owner: None, on_fork: Some(on_fork), on_restore: Some(on_restore) }
}

pub async fn secrets_follow_their_fate(world: Arc<World>) -> Result<()> {
    const LIST: &str = "cd /run/keiki/secrets 2>/dev/null && for f in *; do echo $f=$(cat $f); done";
    let client = &world.node.client;
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let token = format!("token-{}-{}", std::process::id(), since.as_nanos());
    let given = BTreeMap::from([
        ("KEPT".to_owned(), secret("kept", Fate::Inherit, Fate::Inherit)),
        ("NEVER".to_owned(), secret(&token, Fate::Drop, Fate::Drop)),
    ]);
    let parent = create(client, None, given).await?;
    ensure!(parent.sh(LIST).await? == format!("KEPT=kept\nNEVER={token}"), "not as given");
    ensure!(parent.sh("stat -c %a:%U /run/keiki/secrets/NEVER").await? == "400:root", "anybody may read it");
    let child = parent.fork_one().await?;
    ensure!(child.sh(LIST).await? == "KEPT=kept", "a fork has a secret that is dropped");
    let snapshot = parent.snapshot().await?;
    ensure!(parent.sh(LIST).await? == format!("KEPT=kept\nNEVER={token}"), "a snapshot took a secret away");
    ensure!(Sandbox::restore(client, &snapshot).await?.sh(LIST).await? == "KEPT=kept", "a restore has it");
    client.hibernate(parent.id).await?;
    ensure!(parent.sh(LIST).await? == format!("KEPT=kept\nNEVER={token}"), "a wake lost a secret");

    let given = BTreeMap::from([("OWN".to_owned(), secret("one", Fate::Replace, Fate::Replace))]);
    let parent = create(client, None, given).await?;
    let refused = parent.fork_one().await.err().context("a fork without a value for OWN")?;
    ensure!(format!("{refused:#}").contains("OWN needs a new value"), "{refused:#}");
    let other = BTreeMap::from([("OWN".to_owned(), secret("two", Fate::Replace, Fate::Replace))]);
    let forked =
        client.fork(parent.id, &ForkSandbox { secrets: Some(other), ..ForkSandbox::default() }).await?;
    let child = Sandbox { client: client.clone(), id: forked.sandbox.id };
    ensure!(child.sh(LIST).await? == "OWN=two" && parent.sh(LIST).await? == "OWN=one", "not replaced");
    client.pause(parent.id).await?;
    let refused = parent.snapshot().await.err().context("a paused machine's secrets cannot be taken out")?;
    ensure!(format!("{refused:#}").contains("resume it first"), "{refused:#}");
    ensure!(parent.view().await?.status == Status::Paused, "it is no longer paused");
    Ok(())
}

async fn create(client: &Client, from: Option<String>, secrets: BTreeMap<String, Secret>) -> Result<Sandbox> {
    let request = CreateSandbox { from_snapshot: from, secrets: Some(secrets), ..CreateSandbox::default() };
    Ok(Sandbox { client: client.clone(), id: client.create(&request).await?.id })
}
