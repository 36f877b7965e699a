//! A process in a sandbox that holds RAM, and rewrites or reads it on request. Forks have it too.

use crate::exit::Failure;
use keiki_client::{Client, SandboxId, api::ExecRequest};

/// RAM it holds in most metrics, in MiB.
pub const MIB: u64 = 64;

const DIR: &str = "/tmp/keiki-bench";
/// Reads orders from one pipe, and writes how long each took to another. Its RAM is random, so no
/// two pages are alike.
const SCRIPT: &str = r#"
import mmap, os, sys, time
MIB = 1 << 20
size, orders, done = int(sys.argv[1]) * MIB, sys.argv[2], sys.argv[3]
ram = mmap.mmap(-1, size)
for at in range(0, size, MIB):
    ram[at:at + MIB] = os.urandom(MIB)
def write(upto, n):
    for at in range(0, upto, 4096):
        ram[at] = n & 255
def read():
    for at in range(0, size, 4096):
        ram[at]
n = 0
while True:
    with open(orders) as f:
        order = f.read().split()
    n += 1
    begun = time.monotonic()
    if order[0] == "read":
        read()
    elif order[0] == "write":
        write(int(order[1]) * MIB, n)
    with open(done, "w") as f:
        f.write("%f\n" % ((time.monotonic() - begun) * 1000))
    while order[0] == "spin":
        n += 1
        write(size, n)
"#;

pub struct Holder<'a> {
    client: &'a Client,
    id: SandboxId,
    mib: u64,
}

impl<'a> Holder<'a> {
    /// Starts the process; returns once it holds its RAM.
    pub async fn start(client: &'a Client, id: SandboxId, mib: u64) -> Result<Self, Failure> {
        client.write_bytes(id, &format!("{DIR}/holder.py"), None, SCRIPT).await?;
        let this = Self { client, id, mib };
        // Orders wait in the pipe until it runs.
        this.shell(&format!(
            "cd {DIR} && mkfifo orders done || exit 1; \
             setsid python3 holder.py {mib} orders done </dev/null >log 2>&1 &"
        ))
        .await?;
        this.order("ready").await?;
        Ok(this)
    }

    /// The same process in a fork.
    pub fn of(&self, child: SandboxId) -> Self {
        Self { client: self.client, id: child, mib: self.mib }
    }

    /// Rewrites all its RAM once; returns how long that took in the guest, in ms.
    pub async fn write(&self) -> Result<f64, Failure> {
        self.write_mib(self.mib).await
    }

    /// Rewrites part of its RAM.
    pub async fn write_mib(&self, mib: u64) -> Result<f64, Failure> {
        self.order(&format!("write {mib}")).await
    }

    /// Reads all its RAM.
    pub async fn read(&self) -> Result<f64, Failure> {
        self.order("read").await
    }

    /// Rewrites its RAM forever.
    pub async fn spin(&self) -> Result<(), Failure> {
        self.order("spin").await.map(drop)
    }

    async fn order(&self, order: &str) -> Result<f64, Failure> {
        let answer = self.shell(&format!("cd {DIR} && echo {order} > orders && cat done")).await?;
        answer.trim().parse().map_err(|_| {
            Failure::Wrong(format!("the process that holds RAM answered {answer:?} to {order:?}"))
        })
    }

    async fn shell(&self, line: &str) -> Result<String, Failure> {
        let request =
            ExecRequest { cmd: Some(line.into()), timeout_seconds: Some(300.0), ..Default::default() };
        let result = self.client.exec(self.id, &request).await?;
        if result.exit_code == 0 {
            return Ok(result.stdout);
        }
        let why = result.stderr.trim();
        Err(Failure::Wrong(format!("the process that holds RAM failed: {line:?}: {why}")))
    }
}
