//! Breaks each step of the release gate, as a guest can. Whatever the step: the copy is destroyed,
//! its caller gets the reason, the original continues, and nothing is left.

use crate::{World, node::Node, sandbox::Sandbox, within};
use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use keiki_types::{
    Status,
    api::{
        CreateSandbox, ForkSandbox,
        secrets::{Fate, Secret},
    },
};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// In parallel: guests are slow, and some of them wait.
const AT_ONCE: usize = 4;

/// How a step is broken, and the error its caller gets.
struct Broken {
    step: &'static str,
    how: How,
    told: &'static str,
}

enum How {
    /// By a file where the step writes, or that it runs.
    Shell(&'static str),
    /// By the result of the agent's system calls with this number. First the preparation.
    Call { before: &'static str, call: &'static str, answer: &'static str },
}

/// A guest's root may trace the first process, and keeps running while it assumes the identity.
/// `saboteur.py NUMBER[:FIRST-BYTES-OF-SECOND-ARGUMENT] ANSWER`: an error's number, `hang` or
/// `end`.
const SABOTEUR: &str = r#"
import ctypes, errno, os, sys, time
number, _, argument = sys.argv[1].partition(":")
number, argument, answer = int(number), int(argument, 0) if argument else None, sys.argv[2]
open("/sys/fs/cgroup/keiki/cgroup.procs", "w").write("0")
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.restype, ptrace.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SYSCALL, PEEK, POKE, SEIZE, INTERRUPT = 24, 3, 6, 0x4206, 0x4207
AX, SI, DI, CALL = 10 * 8, 13 * 8, 14 * 8, 15 * 8
def do(request, address=0, data=0):
    ctypes.set_errno(0)
    got = ptrace(request, 1, address, data)
    if ctypes.get_errno(): raise OSError(ctypes.get_errno(), "ptrace")
    return got & (1 << 64) - 1
do(SEIZE, 0, 1)
do(INTERRUPT)
os.waitpid(1, 0x40000000)
open("/dev/shm/seized", "w").close()
inside = broken = False
signal = 0
while True:
    do(SYSCALL, 0, signal)
    _, status = os.waitpid(1, 0x40000000)
    signal = status >> 8 & 0xff
    if status >> 16: signal = 0; continue
    if signal != 5 | 0x80: continue
    signal, inside = 0, not inside
    if inside and do(PEEK, CALL) == number and argument in (None, do(PEEK, SI)):
        if answer == "hang": time.sleep(1e6)
        broken = True
        do(POKE, CALL, 231 if answer == "end" else (1 << 64) - 1)
    elif broken and not inside:
        broken = False
        do(POKE, AX, (1 << 64) - int(answer))
"#;

const CASES: [Broken; 14] = [
    // ioctl RNDADDENTROPY, and RNDRESEEDCRNG
    call("entropy", "", "16:0x40085203", "1", "step entropy failed: Operation not permitted"),
    call("entropy", "", "16:0x5207", "1", "step entropy failed: Operation not permitted"),
    call("clock", "", "227", "1", "step clock failed: Operation not permitted"),
    call("hostname", "", "170", "1", "step hostname failed: Operation not permitted"),
    shell(
        "machine_id",
        "echo other >/dev/shm/id && mount --bind /dev/shm/id /etc/machine-id && mount -o remount,ro,bind /etc/machine-id",
        "step machine_id failed: Read-only file system",
    ),
    shell(
        "seeds",
        "mkdir -p /var/lib/systemd && cd /var/lib/systemd && echo x >random-seed && \
         mount --bind random-seed random-seed && mount -o remount,ro,bind random-seed",
        "step seeds failed: Read-only file system",
    ),
    shell(
        "host_keys",
        "mkdir -p /etc/ssh && echo x >/etc/ssh/ssh_host_ed25519_key && printf '#!/bin/sh\\nexit 3\\n' >/usr/bin/ssh-keygen && \
         chmod +x /usr/bin/ssh-keygen",
        "step host_keys failed: ",
    ),
    // pidfd_getfd, of a connection with the slot's name server
    call(
        "connections",
        "cat >/root/far.py <<X\nimport socket, time\ns = socket.create_connection((\"172.31.255.1\", 53))\n\
         open(\"/dev/shm/far\", \"w\").close()\ntime.sleep(1000)\nX\n\
         setsid python3 /root/far.py </dev/null >/dev/null 2>&1 & \
         for i in $(seq 100); do [ -e /dev/shm/far ] && exit 0; sleep 0.1; done; exit 1",
        "438",
        "1",
        "step connections failed: Operation not permitted",
    ),
    shell("secrets", "echo >/run/keiki/secrets", "step secrets failed: Not a directory"),
    shell(
        "generation",
        "rm /run/keiki/generation && mkdir /run/keiki/generation",
        "step generation failed: Is a directory",
    ),
    shell(
        "hooks",
        "mkdir -p /etc/keiki/thaw.d && cd /etc/keiki/thaw.d && printf '#!/bin/sh\necho no >&2; exit 3\n' >10 && chmod +x 10",
        "step hooks failed: hook 10 exited with 3: no",
    ),
    shell(
        "hooks",
        "mkdir -p /etc/keiki/thaw.d && cd /etc/keiki/thaw.d && printf '#!/no/such/shell\n' >10 && chmod +x 10",
        "step hooks failed: hook 10: No such file or directory",
    ),
    shell(
        "hooks",
        "mkdir -p /etc/keiki/thaw.d && cd /etc/keiki/thaw.d && printf '#!/bin/sh\nsleep 1000\n' >10 && chmod +x 10",
        "step hooks failed: hook 10: /etc/keiki/thaw.d/10 did not exit within 10 s",
    ),
    // The agent exits before it acknowledges, and with it the kernel.
    call("acknowledgement", "", "227", "end", "the guest did not assume its new identity"),
];

const fn shell(step: &'static str, line: &'static str, told: &'static str) -> Broken {
    Broken { step, how: How::Shell(line), told }
}

const fn call(
    step: &'static str,
    before: &'static str,
    call: &'static str,
    answer: &'static str,
    told: &'static str,
) -> Broken {
    Broken { step, how: How::Call { before, call, answer }, told }
}

pub async fn a_copy_that_fails_a_step_is_destroyed_and_its_maker_told(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let before = settled(&world.node, 0).await?;
    let mut cases: Vec<Broken> = CASES.into();
    // The node gives up on an agent after 20 s; its own tests use a shorter time.
    let hangs = call("acknowledgement", "", "227", "hang", "no answer within 20000 ms");
    if std::env::var_os("KEIKI_E2E_LONG").is_some() {
        cases.push(hangs);
    }
    let parents: Vec<Sandbox> = stream::iter(cases)
        .map(|case| async move {
            let parent = Sandbox::create(client).await?;
            refused(&parent, &case).await.with_context(|| format!("{} {}", case.step, case.told))?;
            anyhow::Ok(parent)
        })
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await?;
    ensure!(client.list(false).await?.len() == parents.len(), "a copy that was refused is still there");
    is_settled(&world.node, parents.len(), before).await?;
    Ok(())
}

async fn refused(parent: &Sandbox, case: &Broken) -> Result<()> {
    match case.how {
        How::Shell(line) => drop(parent.sh(line).await?),
        How::Call { before, call, answer } => {
            if !before.is_empty() {
                parent.sh(before).await?;
            }
            parent.client.write_bytes(parent.id, "/root/saboteur.py", None, SABOTEUR).await?;
            parent.background(&format!("python3 /root/saboteur.py {call} {answer} 2>/dev/shm/why")).await?;
            let seized = "for i in $(seq 100); do [ -e /dev/shm/seized ] && exit 0; sleep 0.1; done; cat /dev/shm/why; exit 1";
            parent.sh(seized).await?;
        }
    }
    let told = parent.fork(1).await.err().context("the copy came to be")?;
    ensure!(format!("{told:#}").contains(case.told), "it was told {told:#}");
    ensure!(parent.sh("echo fine").await? == "fine", "the original suffered");
    Ok(())
}

/// The same gate in a restore, in a wake, and with a secret for the copy.
pub async fn every_way_to_a_copy_has_the_gate(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let before = settled(&world.node, 0).await?;
    let parent = Sandbox::create(client).await?;
    // No room for the secret.
    parent.sh("mkdir /run/keiki/secrets && mount -t tmpfs -o size=8k none /run/keiki/secrets").await?;
    let secret =
        Secret { value: "x".repeat(60_000), owner: None, on_fork: None, on_restore: Some(Fate::Drop) };
    let given = BTreeMap::from([("BIG".to_owned(), secret)]);
    let forked =
        client.fork(parent.id, &ForkSandbox { secrets: Some(given), ..ForkSandbox::default() }).await;
    told(forked, "step secrets failed: No space left on device")?;
    parent.sh("umount /run/keiki/secrets && rm /run/keiki/generation && mkdir /run/keiki/generation").await?;
    let snapshot = parent.snapshot().await?;
    let restored = client.restore(snapshot.id, CreateSandbox::default()).await;
    told(restored, "step generation failed: Is a directory")?;
    client.hibernate(parent.id).await?;
    told(client.wake(parent.id).await, "step generation failed: Is a directory")?;
    ensure!(parent.view().await?.status == Status::Hibernated, "it is not as it was before the wake");
    parent.kill().await?;
    client.delete_snapshot(snapshot.id).await?;
    is_settled(&world.node, 0, before).await?;
    Ok(())
}

/// What a hook or a watching program can rely on.
pub async fn generations_grow_along_a_lineage(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    let child = parent.fork_one().await?;
    let restored = Sandbox::restore(client, &child.snapshot().await?).await?;
    let mut generations = Vec::new();
    for copy in [&parent, &child, &restored] {
        generations.push(copy.view().await?.generation);
    }
    client.hibernate(restored.id).await?;
    client.wake(restored.id).await?;
    generations.push(restored.view().await?.generation);
    ensure!(generations.is_sorted_by(|before, after| before < after), "{generations:?}");
    let inside = restored.sh("cat /run/keiki/generation").await?;
    ensure!(generations.last().map(ToString::to_string) == Some(inside), "not what the guest knows");
    Ok(())
}

fn told<T>(made: keiki_client::Result<T>, words: &str) -> Result<()> {
    let error = made.err().context("it came to be")?;
    ensure!(error.status() == Some(500) && error.to_string().contains(words), "it was told {error}");
    Ok(())
}

/// Nothing is left of a rejected copy.
async fn is_settled(node: &Node, sandboxes: usize, before: [usize; 3]) -> Result<()> {
    let after = settled(node, sandboxes).await?;
    ensure!(
        after == before,
        "monitors, slots, directories beside {sandboxes} sandboxes: {before:?}, now {after:?}"
    );
    Ok(())
}

/// What the node has on its host besides this many sandboxes, once that is stable: it prepares
/// ahead.
async fn settled(node: &Node, sandboxes: usize) -> Result<[usize; 3]> {
    let begun = Instant::now();
    let (mut last, mut same) = (None, 0);
    while begun.elapsed() < within(15) {
        let traces = node.traces()?;
        let counts = [traces.monitors.len(), traces.namespaces, traces.sandboxes];
        let beside = counts.map(|count| count.saturating_sub(sandboxes));
        same = if last == Some(beside) { same + 1 } else { 0 };
        if same == 5 {
            return Ok(beside);
        }
        last = Some(beside);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    bail!("it never comes to rest: {last:?}")
}
