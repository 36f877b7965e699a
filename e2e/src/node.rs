//! A node process of the tests' own.

use crate::within;
use anyhow::{Context, Result, bail, ensure};
use keiki_client::Client;
use keiki_types::api::BuildTemplate;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU8, Ordering},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

/// Each node of a run gets a network of its own: 10.213.0.0/16 and on.
const FIRST_RANGE: u8 = 213;
/// No test starts more nodes. A process that runs all tests has all ranges.
const RANGES_OF_A_PROCESS: u8 = 4;
static NEXT_RANGE: AtomicU8 = AtomicU8::new(0);
const START_LIMIT: u64 = 60;
const STOP_LIMIT: u64 = 60;

/// Where the tests find and put things.
#[derive(Debug, Clone)]
pub struct Places {
    root: PathBuf,
    cache: PathBuf,
    bin: PathBuf,
}

impl Places {
    /// From the environment and this program's place.
    pub fn from_env() -> Result<Self> {
        let exe = std::env::current_exe()?;
        let target = exe.ancestors().nth(3).context("this program is not in cargo's target directory")?;
        let here = std::env::current_dir()?.join(".keiki");
        let var = |name: &str, default: PathBuf| std::env::var_os(name).map_or(default, PathBuf::from);
        let root = var("KEIKI_E2E_DIR", here.join("e2e"));
        let cache = var("KEIKI_E2E_CACHE", here.join("cache"));
        let bin = var("KEIKI_E2E_BIN", target.join("keiki-dev"));
        for program in ["keiki", "keiki-guest"] {
            ensure!(
                bin.join(program).is_file(),
                "{} is missing: build it first",
                bin.join(program).display()
            );
        }
        fs::create_dir_all(&root)?;
        Ok(Self { root, cache, bin })
    }

    /// Those of a lane: names of nodes and files in it are not another's.
    pub fn lane(&self, lane: usize) -> Self {
        let root = if lane == 0 { self.root.clone() } else { self.root.join(format!("lane-{lane}")) };
        Self { root, ..self.clone() }
    }

    /// A program under test.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// A small file for a test; returns its path.
    pub fn file(&self, name: &str, contents: &str) -> Result<String> {
        let path = self.root.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        fs::write(&path, contents)?;
        Ok(path.to_string_lossy().into_owned())
    }
}

/// The first lane of this process. Nextest runs several processes and numbers them.
pub fn first_lane() -> usize {
    crate::number("NEXTEST_TEST_GLOBAL_SLOT").unwrap_or(0)
}

/// Parallel processes have different ranges.
fn first_range() -> u8 {
    let first = crate::number("KEIKI_E2E_RANGE").unwrap_or(FIRST_RANGE);
    first + u8::try_from(first_lane()).unwrap_or(0) * RANGES_OF_A_PROCESS
}

/// How a node is to be.
#[derive(Debug, Clone)]
pub struct Options {
    name: String,
    extra: Vec<String>,
    range: u8,
    store_gib: u32,
    listen: String,
    /// Its data stay for the next process in the same lane.
    kept: bool,
}

impl Options {
    /// A node with directories of this name.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.into(),
            extra: Vec::new(),
            range: first_range() + NEXT_RANGE.fetch_add(1, Ordering::Relaxed),
            store_gib: 4,
            listen: "127.0.0.1:0".into(),
            kept: false,
        }
    }

    /// Under nextest, keeps its data, above all templates, for the next process in this lane.
    #[must_use]
    pub fn kept_by_nextest(self) -> Self {
        Self { kept: std::env::var_os("NEXTEST").is_some(), ..self }
    }

    /// With a store of this size.
    #[must_use]
    pub fn store_gib(self, store_gib: u32) -> Self {
        Self { store_gib, ..self }
    }

    /// On the slots of another node, which cannot be.
    #[must_use]
    pub fn on_slots_of(self, node: &Node) -> Self {
        Self { range: node.options.range, ..self }
    }

    /// At another address.
    #[must_use]
    pub fn listen(self, listen: &str) -> Self {
        Self { listen: listen.into(), ..self }
    }

    /// With more arguments.
    #[must_use]
    pub fn with(mut self, args: &[&str]) -> Self {
        self.extra.extend(args.iter().map(|arg| (*arg).into()));
        self
    }
}

/// A running node.
pub struct Node {
    /// Its API.
    pub client: Client,
    /// Its data directory.
    pub data: PathBuf,
    /// First two bytes of its slots' addresses.
    pub range: String,
    places: Places,
    options: Options,
    child: Child,
}

impl Node {
    /// Starts one on empty directories.
    pub async fn start(places: &Places, options: Options) -> Result<Self> {
        // What a failed run left would be found again.
        let home = places.root.join(&options.name);
        if !options.kept && home.exists() {
            fs::remove_dir_all(home)?;
        }
        Self::spawn(places, options, None).await
    }

    async fn spawn(places: &Places, options: Options, fail: Option<&str>) -> Result<Self> {
        let home = places.root.join(&options.name);
        let (data, run) = (home.join("data"), home.join("run"));
        fs::create_dir_all(&home)?;
        let log = fs::OpenOptions::new().create(true).append(true).open(home.join("node.log"))?;
        let range = format!("10.{}", options.range);
        let engine = std::env::var("KEIKI_ENGINE").unwrap_or_else(|_| "qemu".into());
        let mut child = Command::new(places.bin.join("keiki"))
            .args(["node", "--listen", &options.listen, "--ephemeral", "--engine", &engine])
            .args(["--store-gib", &options.store_gib.to_string()])
            .arg("--data-dir")
            .arg(&data)
            .arg("--run-dir")
            .arg(&run)
            .arg("--cache-dir")
            .arg(&places.cache)
            .arg("--guest-binary")
            .arg(places.bin.join("keiki-guest"))
            .args(["--slot-range", &format!("{range}.0.0/16")])
            .args(&options.extra)
            .envs(fail.map(|fail| ("KEIKI_FAIL", fail)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        let out = child.stdout.take().context("no output of the node")?;
        let mut lines = BufReader::new(out).lines();
        let first = tokio::time::timeout(within(START_LIMIT), lines.next_line())
            .await
            .context("the node did not start")??;
        let first = first.with_context(|| format!("the node ended: {}", tail(&home.join("node.log"))))?;
        let url = first.rsplit(' ').next().unwrap_or_default();
        ensure!(url.starts_with("http://"), "unexpected first line {first:?}");
        let client = Client::new(url)?;
        Ok(Self { client, data, range, places: places.clone(), options, child })
    }

    /// Builds and bakes the base template.
    pub async fn bake(&self) -> Result<()> {
        let request = BuildTemplate { name: "base".into(), ..BuildTemplate::default() };
        let mut build = self.client.build_template(&request).await?;
        while build.ended_at.is_empty() {
            tokio::time::sleep(Duration::from_millis(200)).await;
            build = self.client.build(&build.id).await?;
        }
        ensure!(build.status == "done", "the template could not be built: {}", build.error);
        Ok(())
    }

    /// Kills the daemon as a crash would.
    pub async fn kill(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_none() {
            self.child.start_kill()?;
            self.child.wait().await?;
        }
        Ok(())
    }

    /// Starts the daemon again after [`Node::kill`].
    pub async fn restart(&self) -> Result<Self> {
        self.restart_failing(None).await
    }

    /// Starts it again, to die at a step: `VERB:N`.
    pub async fn restart_failing(&self, fail: Option<&str>) -> Result<Self> {
        Self::spawn(&self.places, self.options.clone(), fail).await
    }

    /// Has the daemon ended by itself, or does it within this time?
    pub async fn has_died(&mut self, limit: Duration) -> Result<bool> {
        match tokio::time::timeout(limit, self.child.wait()).await {
            Ok(ended) => ended.map(|_| true).map_err(Into::into),
            Err(_) => Ok(self.child.try_wait()?.is_some()),
        }
    }

    /// Deletes all sandboxes and snapshots.
    pub async fn delete_all(&self) {
        for sandbox in self.client.list(false).await.unwrap_or_default() {
            let _ = self.client.delete(sandbox.id).await;
        }
        for snapshot in self.client.snapshots(None).await.unwrap_or_default() {
            let _ = self.client.delete_snapshot(snapshot.id).await;
        }
    }

    /// What of this node is on the host: monitors, namespaces, mounts, sockets.
    pub fn traces(&self) -> Result<Traces> {
        let data = self.data.to_string_lossy().into_owned();
        let mut traces = Traces::default();
        for entry in fs::read_dir("/proc")? {
            let Ok(pid) = entry?.file_name().to_string_lossy().parse::<u32>() else { continue };
            if holds(pid, &data) {
                traces.monitors.push(pid);
            }
        }
        traces.mounts = fs::read_to_string("/proc/mounts")?.matches(&data).count();
        traces.namespaces = self.links()?;
        let store = self.data.join("store/sandboxes");
        traces.sandboxes = fs::read_dir(store).map(Iterator::count).unwrap_or(0);
        Ok(traces)
    }

    /// Does a monitor run for this sandbox?
    pub fn has_monitor(&self, id: keiki_types::SandboxId) -> Result<bool> {
        Ok(!self.monitors_of(id)?.is_empty())
    }

    /// The monitors that run for this sandbox.
    pub fn monitors_of(&self, id: keiki_types::SandboxId) -> Result<Vec<u32>> {
        // Its directories: of what it runs on, and of its sockets.
        let marks = [id.to_string(), id.to_string().replace('-', "")];
        let mut pids = self.traces()?.monitors;
        pids.retain(|pid| marks.iter().any(|mark| holds(*pid, mark)));
        Ok(pids)
    }

    /// Host ends of this node's slots, by their addresses.
    fn links(&self) -> Result<usize> {
        let shown = std::process::Command::new("ip").args(["-o", "-4", "addr"]).output()?;
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        Ok(shown.lines().filter(|line| line.contains(&format!(" {}.", self.range))).count())
    }

    /// The last lines the node logged.
    pub fn log_tail(&self) -> String {
        tail(&self.places.root.join(&self.options.name).join("node.log"))
    }

    /// Stops the node and makes sure that nothing is left of it.
    pub async fn finish(mut self) -> Result<()> {
        let home = self.places.root.join(&self.options.name);
        let pid = self.child.id().context("the node has ended already")?;
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid)?).context("no pid")?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let stopped = tokio::time::timeout(within(STOP_LIMIT), self.child.wait()).await;
        let status = stopped.context("the node did not stop")??;
        ensure!(status.success(), "the node ended with {status}: {}", tail(&home.join("node.log")));
        let begun = Instant::now();
        loop {
            let traces = self.traces()?;
            if traces == Traces::default() {
                break;
            }
            if begun.elapsed() > within(5) {
                bail!("left behind: {traces:?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        if !self.options.kept && std::env::var_os("KEIKI_E2E_KEEP_LOGS").is_none() {
            fs::remove_dir_all(home)?;
        }
        Ok(())
    }
}

/// A test that failed drops its node: it is asked to end with all it made, and given time for it.
impl Drop for Node {
    fn drop(&mut self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) else { return };
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let begun = Instant::now();
        while begun.elapsed() < within(STOP_LIMIT) && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// What a node has on its host.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Traces {
    /// Process ids.
    pub monitors: Vec<u32>,
    /// Mounts below its data directory.
    pub mounts: usize,
    /// Slots.
    pub namespaces: usize,
    /// Directories of machines.
    pub sandboxes: usize,
}

/// Is this a monitor that was started for, or has opened or mapped, something whose path contains `mark`? One that was
/// forked off another still has the other's command line.
fn holds(pid: u32, mark: &str) -> bool {
    let text = |name: &str| {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\0', " ")
    };
    let line = text("cmdline");
    if line.contains("qemu-system") {
        return line.contains(mark);
    }
    let open = || {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.filter_map(|file| fs::read_link(file.path()).ok())
    };
    text("comm").trim() == "keiki-vmm"
        && (open().any(|path| path.to_string_lossy().contains(mark)) || text("maps").contains(mark))
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
