//! What runs in the demo's sandboxes, and how the demo observes it.

use crate::exit::Failure;
use keiki_client::{Client, SandboxId, api::ExecRequest};
use serde::Deserialize;
use std::time::{Duration, Instant};

const DISK: &str = "/srv/keiki-demo";
/// How long to wait for the process.
const PATIENCE: Duration = Duration::from_secs(60);

/// Builds a table (work that is worth keeping), then counts. Its RAM holds a random secret and the
/// labels it was given. Twenty times a second it publishes what it holds.
const COUNTER: &str = r#"
import json, os, sys, time
shown, label_file = sys.argv[1], sys.argv[2]
secret = os.urandom(16).hex()
sieve = bytearray([1]) * 200000
for n in range(2, 448):
    if sieve[n]:
        sieve[n * n::n] = bytes(len(range(n * n, len(sieve), n)))
primes = [n for n in range(2, len(sieve)) if sieve[n]]
counter, labels = 0, []
while True:
    try:
        with open(label_file) as f:
            label = f.read().strip()
    except FileNotFoundError:
        label = ""
    if label and label not in labels:
        labels.append(label)
    counter += 1
    with open(shown + ".new", "w") as f:
        held = {"secret": secret, "pid": os.getpid(), "primes": len(primes)}
        held.update(counter=counter, labels=labels)
        json.dump(held, f)
    os.rename(shown + ".new", shown)
    time.sleep(0.05)
"#;

/// What the process holds in its RAM.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Held {
    /// Random, drawn once.
    pub secret: String,
    pub pid: u32,
    /// Length of the table.
    pub primes: u32,
    /// Ticks so far.
    pub counter: u64,
    /// Labels it was given.
    pub labels: Vec<String>,
}

/// The contents of a sandbox's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Digests of the built files on disk and in the tmpfs.
    pub digests: String,
    /// Labels written to disk and to the tmpfs; `-` for none.
    pub labels: String,
}

/// One sandbox of the demo.
#[derive(Debug, Clone)]
pub struct Guest {
    client: Client,
    pub id: SandboxId,
    tmpfs: String,
}

impl Guest {
    /// Finds a tmpfs in the sandbox.
    pub async fn find(client: &Client, id: SandboxId) -> Result<Self, Failure> {
        let mut guest = Self { client: client.clone(), id, tmpfs: String::new() };
        let line = "for d in /dev/shm /run /tmp; do \
                    [ \"$(stat -f -c %T $d)\" = tmpfs ] && echo $d && exit; done; \
                    mkdir -p /mnt/keiki-demo && mount -t tmpfs tmpfs /mnt/keiki-demo && echo /mnt/keiki-demo";
        guest.tmpfs = format!("{}/keiki-demo", guest.shell(line).await?.trim());
        Ok(guest)
    }

    /// A copy of this sandbox, with everything in the same places.
    pub fn relative(&self, id: SandboxId) -> Self {
        Self { id, ..self.clone() }
    }

    /// Builds state: files on disk and in the tmpfs, and the process.
    pub async fn build(&self) -> Result<(), Failure> {
        let (disk, tmpfs) = (DISK, &self.tmpfs);
        self.client.write_bytes(self.id, &format!("{disk}/counter.py"), Some(0o644), COUNTER).await?;
        self.shell(&format!(
            "mkdir -p {tmpfs} && head -c 4194304 /dev/urandom > {disk}/built && \
             head -c 1048576 /dev/urandom > {tmpfs}/built"
        ))
        .await?;
        self.shell(&format!(
            "setsid python3 {disk}/counter.py {tmpfs}/held.json {tmpfs}/label </dev/null >{disk}/log 2>&1 &"
        ))
        .await?;
        Ok(())
    }

    /// What the process holds, once it publishes anything.
    pub async fn held(&self) -> Result<Held, Failure> {
        self.held_when("the process publishes its state", |_| true).await
    }

    /// What the process holds, once `ready` accepts it.
    pub async fn held_when(&self, what: &str, ready: impl Fn(&Held) -> bool) -> Result<Held, Failure> {
        let start = Instant::now();
        loop {
            let shown = self.shell(&format!("cat {}/held.json 2>/dev/null || true", self.tmpfs)).await?;
            if let Ok(held) = serde_json::from_str(&shown)
                && ready(&held)
            {
                return Ok(held);
            }
            if start.elapsed() > PATIENCE {
                let seconds = PATIENCE.as_secs();
                return Err(Failure::Wrong(format!(
                    "{}: timed out after {seconds} s, waiting until {what}; last state: {shown}",
                    self.id
                )));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Labels the process, the disk and the tmpfs.
    pub async fn label(&self, label: &str) -> Result<(), Failure> {
        let tmpfs = &self.tmpfs;
        let line = format!(
            "echo {label} > {DISK}/label && echo {label} > {tmpfs}/label.new && \
             mv {tmpfs}/label.new {tmpfs}/label"
        );
        self.shell(&line).await.map(drop)
    }

    pub async fn files(&self) -> Result<Files, Failure> {
        let tmpfs = &self.tmpfs;
        let digests = self.shell(&format!("sha256sum < {DISK}/built; sha256sum < {tmpfs}/built")).await?;
        let labels = format!("for f in {DISK}/label {tmpfs}/label; do cat $f 2>/dev/null || echo -; done");
        Ok(Files {
            digests,
            labels: self.shell(&labels).await?.split_whitespace().collect::<Vec<_>>().join(" "),
        })
    }

    /// Sixteen random bytes from its kernel, and its host name.
    pub async fn identity(&self) -> Result<(String, String), Failure> {
        let random = self.shell("head -c 16 /dev/urandom | od -An -tx1").await?;
        Ok((random.trim().to_owned(), self.shell("cat /proc/sys/kernel/hostname").await?.trim().to_owned()))
    }

    async fn shell(&self, line: &str) -> Result<String, Failure> {
        let request =
            ExecRequest { cmd: Some(line.into()), timeout_seconds: Some(60.0), ..Default::default() };
        let result = self.client.exec(self.id, &request).await?;
        if result.exit_code == 0 {
            return Ok(result.stdout);
        }
        let (code, why) = (result.exit_code, result.stderr.trim());
        Err(Failure::Wrong(format!("{}: `{line}` exited with {code}: {why}", self.id)))
    }
}
