//! A process in a sandbox that holds RAM and rewrites it when told.

use crate::exit::Failure;
use keiki_client::{Client, SandboxId, api::ExecRequest};

/// How much it holds.
pub const MIB: u64 = 64;

const DIR: &str = "/tmp/keiki-bench";
const SCRIPT: &str = r#"
import mmap, sys
size, orders, done = int(sys.argv[1]) << 20, sys.argv[2], sys.argv[3]
ram = mmap.mmap(-1, size)
def dirty(n):
    for at in range(0, size, 4096):
        ram[at] = n & 255
n = 0
while True:
    with open(orders) as f:
        order = f.read().strip()
    n += 1
    dirty(n)
    with open(done, "w") as f:
        f.write("done\n")
    while order == "spin":
        n += 1
        dirty(n)
"#;

/// The process, by its pipes.
pub struct Dirtier<'a> {
    client: &'a Client,
    id: SandboxId,
}

impl<'a> Dirtier<'a> {
    /// Starts it in a sandbox.
    pub async fn start(client: &'a Client, id: SandboxId) -> Result<Self, Failure> {
        client.write_bytes(id, &format!("{DIR}/dirtier.py"), None, SCRIPT).await?;
        let this = Self { client, id };
        // Its orders wait in the pipe until it runs.
        this.shell(&format!(
            "cd {DIR} && mkfifo orders done || exit 1; setsid python3 dirtier.py {MIB} orders done </dev/null >log 2>&1 &"
        ))
        .await?;
        Ok(this)
    }

    /// Has all its RAM rewritten once; returns when that is done.
    pub async fn dirty(&self) -> Result<(), Failure> {
        self.order("once").await
    }

    /// Has its RAM rewritten again and again, for ever.
    pub async fn spin(&self) -> Result<(), Failure> {
        self.order("spin").await
    }

    async fn order(&self, order: &str) -> Result<(), Failure> {
        self.shell(&format!("cd {DIR} && echo {order} > orders && cat done")).await
    }

    async fn shell(&self, line: &str) -> Result<(), Failure> {
        let request =
            ExecRequest { cmd: Some(line.into()), timeout_seconds: Some(60.0), ..Default::default() };
        let result = self.client.exec(self.id, &request).await?;
        if result.exit_code == 0 {
            return Ok(());
        }
        Err(Failure::Wrong(format!(
            "the process that dirties RAM failed: {line:?}: {}",
            result.stderr.trim()
        )))
    }
}
