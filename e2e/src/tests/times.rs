//! Copies at bad moments: in the middle of work, and long after.

use crate::{World, sandbox::Sandbox};
use anyhow::{Context, Result, ensure};
use std::{
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

/// Queries the name server and rewrites files without a pause, each filled with its turn number. A
/// file on tmpfs, which is replaced atomically, holds the number of answers and the durable turns.
const WORK: &str = r#"
import json, os, socket, threading, time
answers, durable = 0, {}
def ask():
    global answers
    query = b"\x12\x34\x01\0\0\1\0\0\0\0\0\0\4work\4test\0\0\1\0\1"
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.settimeout(0.5)
            try:
                out.sendto(query, ("172.31.255.1", 53))
                answers += out.recv(512)[:2] == b"\x12\x34"
            except OSError: time.sleep(0.01)
def write(who):
    n = 0
    while True:
        n += 1
        path = f"/root/done/{who}-{n % 4}"
        with open(path, "wb") as out:
            out.write(b"%032d" % n * 16384)
            os.fsync(out.fileno())
        durable[path] = n
os.makedirs("/root/done", exist_ok=True)
for job in [(ask, ()), (write, (0,)), (write, (1,))]: threading.Thread(target=job[0], args=job[1], daemon=True).start()
while True:
    with open("/dev/shm/next", "w") as out: json.dump([answers, dict(durable)], out)
    os.replace("/dev/shm/next", "/dev/shm/work")
    time.sleep(0.02)
"#;

/// Compares what the work reported last with the disk. Each of its two threads may be in the middle
/// of a file.
const CHECK: &str = r#"
import json
answers, durable = json.load(open("/dev/shm/work"))
unfinished = 0
for path, n in durable.items():
    data = open(path, "rb").read()
    if len(data) != 32 * 16384 or data != data[:32] * 16384: unfinished += 1
    elif int(data[:32]) < n: print(path, "is of turn", int(data[:32]), "and turn", n, "was durable")
if unfinished > 2: print(unfinished, "files are neither of one turn nor of the next")
print(len(durable), "files")
"#;

async fn answers(sandbox: &Sandbox) -> Result<u64> {
    Ok(sandbox.sh("cut -c2- /dev/shm/work | cut -d, -f1").await?.parse()?)
}

/// Waits until more questions were answered than `before`.
async fn answered(sandbox: &Sandbox, before: u64) -> Result<u64> {
    let begun = Instant::now();
    loop {
        match sandbox.exec("cut -c2- /dev/shm/work | cut -d, -f1").await?.stdout.trim().parse::<u64>() {
            Ok(now) if now > before + 5 => return Ok(now),
            now => ensure!(begun.elapsed() < crate::within(20), "{before} answers, and then {now:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

pub async fn a_copy_of_a_busy_one_is_whole(world: Arc<World>) -> Result<()> {
    let parent = Sandbox::create(&world.node.client).await?;
    for (path, script) in [("/root/work.py", WORK), ("/root/check.py", CHECK)] {
        parent.client.write_bytes(parent.id, path, None, script).await?;
    }
    parent.background("python3 /root/work.py").await?;
    answered(&parent, 0).await?;
    for round in 0..3 {
        let before = answers(&parent).await?;
        let copy = match round {
            2 => Sandbox::restore(&parent.client, &parent.snapshot().await?).await?,
            _ => parent.fork_one().await?,
        };
        // Both continue, on disk and network.
        answered(&copy, before).await?;
        answered(&parent, before).await?;
        // From the disk, not from the cache.
        copy.sh("pkill -STOP python3; sync; echo 3 >/proc/sys/vm/drop_caches").await?;
        let said = copy.sh("python3 /root/check.py").await?;
        let files: u64 =
            said.strip_suffix(" files").and_then(|n| n.parse().ok()).with_context(|| said.clone())?;
        ensure!(files >= 4, "only {said} were written");
        let bad = copy
            .sh("dmesg | grep -iE 'ext4-fs error|i/o error|hung|transmit queue' | head -n 3; true")
            .await?;
        ensure!(bad.is_empty(), "{bad}");
        copy.kill().await?;
    }
    Ok(())
}

/// Keeps counting, and reports whether the monotonic clock went back and how far it leapt at most.
const WATCH: &str = r#"
import os, time
last, leap = time.monotonic(), 0.0
while True:
    now = time.monotonic()
    assert now >= last, (last, now)
    leap, last = max(leap, now - last), now
    with open("/dev/shm/next", "w") as out: out.write("%f %f %f" % (now, leap, time.time()))
    os.replace("/dev/shm/next", "/dev/shm/clock")
    time.sleep(0.02)
"#;
const WEEK: Duration = Duration::from_secs(7 * 86_400);

/// The clock of this machine, set forward; set back on drop. Only on a machine that nothing else
/// uses.
struct Forward(Instant, SystemTime);

impl Forward {
    fn by(duration: Duration) -> Result<Self> {
        let forward = Self(Instant::now(), SystemTime::now());
        set_clock(forward.1 + duration)?;
        Ok(forward)
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        if let Err(error) = set_clock(self.1 + self.0.elapsed()) {
            eprintln!("the clock stays set forward: {error:#}");
        }
    }
}

fn set_clock(to: SystemTime) -> Result<()> {
    let seconds = to.duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64();
    let mut command = std::process::Command::new("date");
    let done = command.args(["-s", &format!("@{seconds:.3}")]).stdout(Stdio::null()).status()?;
    ensure!(done.success(), "the clock cannot be set: {done}");
    Ok(())
}

fn now() -> Result<f64> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64())
}

/// A frozen machine, a stored one and a running one all survive the same jump of the host's clock.
pub async fn a_week_later_the_clock_is_right(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    parent.client.write_bytes(parent.id, "/root/watch.py", None, WATCH).await?;
    parent.background("python3 /root/watch.py 2>/dev/shm/failed").await?;
    parent.sh("for i in $(seq 100); do [ -s /dev/shm/clock ] && exit 0; sleep 0.1; done; exit 1").await?;
    let snapshot = parent.snapshot().await?;
    // Loaded once: from here on its zygote stays resident for a week.
    Sandbox::restore(client, &snapshot).await?.kill().await?;
    let before: f64 = parent.sh("cut -d' ' -f1 /dev/shm/clock").await?.parse()?;
    let forward = Forward::by(WEEK)?;
    let copies = [
        Sandbox::restore(client, &snapshot).await?,
        parent.fork_one().await?,
        Sandbox::create(client).await?,
    ];
    for (n, copy) in copies.iter().enumerate() {
        let drift = copy.sh("date +%s.%N").await?.parse::<f64>()? - now()?;
        ensure!(drift.abs() < 3.0, "copy {n}: its clock is {drift} s off");
    }
    for (n, copy) in copies.iter().take(2).enumerate() {
        copy.sh("sleep 0.5").await?;
        let said = copy.sh("cat /dev/shm/clock; cat /dev/shm/failed >&2").await?;
        let numbers: Vec<f64> = said.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [monotonic, leap, real] = numbers[..] else { anyhow::bail!("{said:?}") };
        ensure!(copy.sh("pgrep -fc watch.p[y]").await? != "0", "copy {n}: its monotonic clock went back");
        // Nothing has aged by a week: timers of programs run as if no time had passed.
        ensure!(
            monotonic < before + 600.0 && leap < 60.0,
            "copy {n}: {said}, and {before} when it was frozen"
        );
        ensure!((real - now()?).abs() < 30.0, "copy {n}: a program sees {real}");
    }
    drop(forward);
    Ok(())
}
