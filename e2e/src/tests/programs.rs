//! `keiki` as people run it: the program, its arguments, its terminal, its exit codes, against a
//! real node.
//!
//! Other tests check what a verb does; these check that the program requests it, shows it, and
//! exits as documented.

use crate::{
    World,
    node::{Node, Options},
    sandbox::Sandbox,
    within,
};
use anyhow::{Context, Result, ensure};
use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};
use serde_json::Value;
use std::{
    ffi::OsStr,
    fs::File,
    os::fd::AsFd,
    path::PathBuf,
    process::{ExitStatus, Output, Stdio},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    net::TcpStream,
    process::{Child, ChildStderr, ChildStdout, Command},
};

/// Timeout for everything these tests wait for, long enough for emulation.
fn soon() -> Duration {
    within(20)
}

/// The program, and the node it talks to.
struct Keiki {
    program: PathBuf,
    url: String,
}

/// How a program exited, and its output.
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\n').to_owned();
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

impl Keiki {
    fn of(world: &World, node: &Node) -> Self {
        Self { program: world.places.program("keiki"), url: node.client.url().to_owned() }
    }

    fn command(&self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).env("KEIKI_URL", &self.url).stdin(Stdio::null()).kill_on_drop(true);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a command line to its end.
    async fn said(&self, line: &str) -> Result<Said> {
        let run = self.command(line.split_whitespace()).output();
        let output =
            tokio::time::timeout(soon(), run).await.with_context(|| format!("`keiki {line}` hangs"))?;
        Ok(output?.into())
    }

    /// Runs a command that must succeed; returns its standard output.
    async fn out(&self, line: &str) -> Result<String> {
        let said = self.said(line).await?;
        ensure!(said.code == Some(0), "`keiki {line}` ended with {:?}: {}{}", said.code, said.out, said.err);
        Ok(said.out)
    }

    async fn json(&self, line: &str) -> Result<Value> {
        let out = self.out(&format!("-o json {line}")).await?;
        serde_json::from_str(&out).with_context(|| format!("`keiki -o json {line}` says {out}"))
    }

    /// Starts a command and leaves it running.
    fn running(&self, line: &str) -> Result<Running> {
        let mut child = self.command(line.split_whitespace()).spawn()?;
        let out = BufReader::new(child.stdout.take().context("no output")?).lines();
        let err = BufReader::new(child.stderr.take().context("no errors")?).lines();
        Ok(Running { child, out, err })
    }
}

/// A program that runs until it is stopped.
struct Running {
    child: Child,
    out: Lines<BufReader<ChildStdout>>,
    err: Lines<BufReader<ChildStderr>>,
}

impl Running {
    /// Lines of its output until one contains these words.
    async fn until(&mut self, words: &str) -> Result<String> {
        let find = async {
            while let Some(line) = self.out.next_line().await? {
                if line.contains(words) {
                    return Ok(line);
                }
            }
            anyhow::bail!("it ended without {words:?}")
        };
        tokio::time::timeout(soon(), find).await.with_context(|| format!("{words:?} did not come"))?
    }

    async fn end(mut self, with: Signal) -> Result<ExitStatus> {
        signal(&self.child, with)?;
        let ended = tokio::time::timeout(soon(), self.child.wait()).await;
        Ok(ended.context("it does not end when it is told to")??)
    }
}

fn signal(child: &Child, signal: Signal) -> Result<()> {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    Ok(kill_process(pid.context("it has ended")?, signal)?)
}

pub async fn verbs_of_every_day(world: Arc<World>) -> Result<()> {
    let keiki = Keiki::of(&world, &world.node);
    let id = keiki.out("create").await?;
    let sandbox = Sandbox { client: world.node.client.clone(), id: id.parse()? };
    sandbox.sh("echo kept > /dev/shm/x").await?;

    ensure!(keiki.out(&format!("ttl {id} 2h --persistent")).await?.starts_with("hibernated after 2h"), "ttl");
    let ttl = keiki.json(&format!("ttl {id}")).await?;
    ensure!(ttl["ttl_seconds"] == 7200 && ttl["persistent"] == true, "{ttl}");
    let ttl = keiki.out(&format!("ttl {id} 30m --ephemeral")).await?;
    ensure!(ttl == "deleted after 30m without activity, 30m left", "{ttl}");
    let refused = keiki.said(&format!("ttl {id} 0")).await?;
    ensure!(refused.code == Some(125) && refused.out.is_empty() && !refused.err.is_empty(), "a TTL of 0");

    // Awake, it uses memory and is in the table; hibernated, neither.
    let table = keiki.out("top --once --full").await?;
    ensure!(table.contains(&id) && table.contains("1 running") && table.contains("PSS"), "{table}");
    let top = keiki.json("top").await?;
    ensure!(top[0]["id"] == id.as_str() && top[0]["pss_bytes"].as_u64() > Some(1 << 20), "{top}");
    ensure!(keiki.out(&format!("hibernate {id}")).await? == id, "hibernate prints the id");
    let top = keiki.json("top --once").await?;
    ensure!(top[0]["status"] == "hibernated" && top[0]["pss_bytes"].is_null(), "{top}");
    ensure!(keiki.out(&format!("wake {id}")).await? == id, "wake prints the id");
    ensure!(keiki.out(&format!("exec {id} cat /dev/shm/x")).await? == "kept", "after a wake");
    let nobody = keiki.said("hibernate 0198c9a2-7d0c-7000-8000-000000000000").await?;
    ensure!(
        nobody.code == Some(125) && nobody.err.contains("no sandbox"),
        "{:?} {}",
        nobody.code,
        nobody.err
    );

    background(&keiki, &id).await?;

    let mut watch = keiki.running(&format!("-o json watch -r {id} /root"))?;
    watch.until("ready").await?;
    sandbox.sh("mkdir /root/w && echo x > /root/w/f").await?;
    let told: Value = serde_json::from_str(&watch.until("/root/w/f").await?)?;
    ensure!(told["kind"] == "created" && told["is_dir"] == false, "{told}");
    ensure!(watch.end(Signal::INT).await?.code() == Some(130), "Ctrl-C ends a watch");

    let mut follow = keiki.running(&format!("-o json events -f {id}"))?;
    follow.until(r#""woken""#).await?;
    sandbox.client.pause(sandbox.id).await?;
    follow.until(r#""paused""#).await?;
    ensure!(follow.end(Signal::INT).await?.code() == Some(130), "Ctrl-C ends it");
    let events = keiki.out(&format!("events {id}")).await?;
    let lines: Vec<&str> = events.lines().collect();
    let told: Vec<&str> = lines.iter().filter_map(|line| line.split_whitespace().nth(3)).collect();
    ensure!(told == ["created", "running", "frozen", "hibernated", "woken", "paused"], "{events}");
    ensure!(
        keiki.json(&format!("events {id} -n 2")).await?.as_array().is_some_and(|two| two.len() == 2),
        "-n"
    );
    ensure!(keiki.out(&format!("rm {id}")).await? == id, "rm");
    Ok(())
}

/// Background commands.
async fn background(keiki: &Keiki, id: &str) -> Result<()> {
    let line = "trap 'echo caught; exit 7' USR1; i=0; while [ $i -lt 9999 ]; do i=$((i+1)); echo line $i; sleep 0.1; done";
    let args = ["exec", "-d", id, "-c", line];
    let started: Said = keiki.command(args).output().await?.into();
    let exec = started.out;
    ensure!(started.code == Some(0) && exec.len() == 36, "exec -d printed {exec:?} {}", started.err);
    ensure!(keiki.out(&format!("ps -q {id}")).await? == exec, "ps lists it");
    let table = keiki.out(&format!("ps --full {id}")).await?;
    ensure!(table.contains(&exec) && table.contains("running") && table.contains("trap"), "{table}");
    let mut reader = keiki.running(&format!("attach {id} {exec}"))?;
    ensure!(reader.until("line").await? == "line 1", "attach begins at the beginning");
    reader.until("line 3").await?;
    // Ctrl-C leaves it running; `line 1` and its newline are seven bytes.
    ensure!(reader.end(Signal::INT).await?.code() == Some(130), "Ctrl-C ends the reading");
    let mut reader = keiki.running(&format!("attach --offset 7 {id} {exec}"))?;
    ensure!(reader.until("line").await? == "line 2", "attach from an offset");
    ensure!(keiki.out(&format!("kill -s USR1 {id} {exec}")).await? == exec, "kill prints the command's id");
    reader.until("caught").await?;
    let ended = tokio::time::timeout(soon(), reader.child.wait()).await.context("it goes on")??;
    ensure!(ended.code() == Some(7), "its exit code came as {ended}");
    let again = keiki.said(&format!("attach --tail 7 {id} {exec}")).await?;
    ensure!(again.code == Some(7) && again.out == "caught", "{:?} {:?}", again.code, again.out);
    ensure!(keiki.out(&format!("ps -q {id}")).await?.is_empty(), "ps lists what has ended");
    ensure!(keiki.out(&format!("ps -a {id}")).await?.contains("exited 7"), "ps -a");
    let late = keiki.said(&format!("kill {id} {exec}")).await?;
    ensure!(late.code == Some(125) && late.err.contains("has ended"), "{:?} {}", late.code, late.err);
    // Input as it arrives, and its end.
    let typed = "printf 'one\\ntwo\\n' | \"$KEIKI\" attach -i \"$ID\" $(\"$KEIKI\" exec -d --stdin-open \"$ID\" -c 'md5sum; exit 3')";
    let mut shell = Command::new("sh");
    shell.args(["-c", typed]).env("KEIKI", &keiki.program).env("KEIKI_URL", &keiki.url).env("ID", id);
    let said: Said = tokio::time::timeout(soon(), shell.output()).await.context("input hangs")??.into();
    ensure!(
        said.code == Some(3) && said.out.starts_with("2094b601daac3d68f5aed51d3c20f7cd"),
        "{:?} {:?}",
        said.code,
        said.out
    );
    Ok(())
}

/// Counts its input until the end, then answers; on the other port it closes first and still reads.
const SERVERS: &str = r#"
import socket, threading
def read(c):
    n = 0
    while (d := c.recv(65536)):
        n += len(d)
    return n
def counts(c):
    c.sendall(b'%d' % read(c))
    c.close()
def ends_first(c):
    c.sendall(b'bye')
    c.shutdown(socket.SHUT_WR)
    open('/tmp/after', 'w').write(str(read(c)))
def serve(port, work):
    s = socket.create_server(('127.0.0.1', port))
    open('/tmp/serving%d' % port, 'w').close()
    while True:
        threading.Thread(target=work, args=(s.accept()[0],), daemon=True).start()
threading.Thread(target=serve, args=(7001, counts), daemon=True).start()
serve(7002, ends_first)
"#;

pub async fn a_forward_keeps_half_closes(world: Arc<World>) -> Result<()> {
    let keiki = Keiki::of(&world, &world.node);
    let sandbox = Sandbox::create(&world.node.client).await?;
    sandbox.client.write_bytes(sandbox.id, "/tmp/servers.py", None, SERVERS).await?;
    sandbox.background("python3 /tmp/servers.py").await?;
    sandbox.sh("until [ -e /tmp/serving7001 ] && [ -e /tmp/serving7002 ]; do sleep 0.05; done").await?;
    let mut forward = keiki.running(&format!("forward {} 0:7001 0:7002", sandbox.id))?;
    let mut addresses = Vec::new();
    for _ in 0..2 {
        let line = forward.until(" -> ").await?;
        addresses.push(line.split(' ').next().unwrap_or_default().to_owned());
    }
    let carried = async {
        let mut counts = TcpStream::connect(&addresses[0]).await?;
        counts.write_all(&vec![7; 300_000]).await?;
        counts.shutdown().await?;
        let mut answer = String::new();
        counts.read_to_string(&mut answer).await?;
        ensure!(answer == "300000", "our end was not seen inside: {answer:?}");
        let mut ends_first = TcpStream::connect(&addresses[1]).await?;
        let mut answer = String::new();
        ends_first.read_to_string(&mut answer).await?;
        ensure!(answer == "bye", "its words were {answer:?}");
        ends_first.write_all(b"still here").await?;
        ends_first.shutdown().await?;
        let after = sandbox.sh("until [ -s /tmp/after ]; do sleep 0.05; done; cat /tmp/after").await?;
        ensure!(after == "10", "after its end came {after} bytes");
        Ok(())
    };
    tokio::time::timeout(soon(), carried).await.context("a forwarded connection hangs")??;
    ensure!(forward.end(Signal::INT).await?.code() == Some(0), "Ctrl-C is how a forward ends");
    let taken = keiki
        .said(&format!(
            "forward {} {}:1",
            sandbox.id,
            world.node.client.url().rsplit(':').next().unwrap_or_default()
        ))
        .await?;
    ensure!(
        taken.code == Some(125) && taken.err.contains("cannot listen on"),
        "a port that is taken: {}",
        taken.err
    );
    Ok(())
}

/// A terminal that runs the program, like a terminal window.
struct Screen {
    child: Child,
    master: File,
    keys: tokio::fs::File,
    shown: tokio::fs::File,
    seen: Vec<u8>,
}

impl Screen {
    fn open(keiki: &Keiki, line: &str, (cols, rows): (u16, u16)) -> Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags)?;
        unlockpt(&master)?;
        let far = File::from(ioctl_tiocgptpeer(&master, flags)?);
        let master = File::from(master);
        // Make it the controlling terminal: only then is a resize signalled.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(&keiki.program).args(line.split_whitespace()).env("KEIKI_URL", &keiki.url);
        command.stdin(far.try_clone()?).stdout(far.try_clone()?).stderr(far).kill_on_drop(true);
        let (keys, shown) = (master.try_clone()?.into(), master.try_clone()?.into());
        let screen = Self {
            child: {
                size(&master, cols, rows)?;
                command.spawn()?
            },
            master,
            keys,
            shown,
            seen: Vec::new(),
        };
        Ok(screen)
    }

    async fn type_in(&mut self, keys: impl AsRef<[u8]>) -> Result<()> {
        self.keys.write_all(keys.as_ref()).await?;
        Ok(self.keys.flush().await?)
    }

    /// Output up to and including these words, which later calls skip.
    async fn until(&mut self, words: &str) -> Result<String> {
        let find = async {
            loop {
                let text = String::from_utf8_lossy(&self.seen).into_owned();
                if let Some(at) = text.find(words) {
                    let rest = text.as_bytes()[at + words.len()..].to_vec();
                    self.seen = rest;
                    return Ok(text[..at + words.len()].to_owned());
                }
                let mut piece = [0; 4096];
                match self.shown.read(&mut piece).await {
                    Ok(got) if got > 0 => self.seen.extend_from_slice(&piece[..got]),
                    // The last process on the terminal has left it.
                    _ => anyhow::bail!("it ended without {words:?}; it showed {text:?}"),
                }
            }
        };
        let found = tokio::time::timeout(soon(), find).await;
        found.with_context(|| {
            format!("{words:?} did not come; {:?} did", String::from_utf8_lossy(&self.seen))
        })?
    }

    async fn end(mut self) -> Result<Option<i32>> {
        let ended = tokio::time::timeout(soon(), self.child.wait()).await.context("it does not end")??;
        // Echo and line mode must be restored, or the user's shell is unusable afterwards.
        let modes = tcgetattr(&self.master)?.local_modes;
        ensure!(modes.contains(LocalModes::ECHO | LocalModes::ICANON), "the terminal stays raw: {modes:?}");
        Ok(ended.code())
    }
}

fn size(master: impl AsFd, cols: u16, rows: u16) -> Result<()> {
    Ok(tcsetwinsize(master, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 })?)
}

pub async fn a_shell_on_a_terminal(world: Arc<World>) -> Result<()> {
    let keiki = Keiki::of(&world, &world.node);
    let sandbox = Sandbox::create(&world.node.client).await?;
    let id = sandbox.id;
    let piped = keiki.said(&format!("shell {id}")).await?;
    ensure!(piped.code == Some(125) && piped.err.contains("needs a terminal"), "{}", piped.err);
    let mut screen = Screen::open(&keiki, &format!("shell {id}"), (80, 24))?;
    // Typed before there is a reader.
    screen.type_in("stty size; echo $TERM; x=kept; echo re''ady\n").await?;
    let seen = screen.until("ready").await?;
    ensure!(seen.contains("24 80") && seen.contains("256color"), "{seen:?}");
    // A new size of the window, a colour of 256, keys that are signals.
    size(&screen.master, 132, 50)?;
    screen.type_in("until [ \"$(stty size)\" = '50 132' ]; do sleep 0.1; done; echo si''zed\n").await?;
    screen.until("sized").await?;
    screen.type_in("printf '\\033[38;5;196mr''ed\\033[0m\\n'\n").await?;
    screen.until("\u{1b}[38;5;196mred\u{1b}[0m").await?;
    screen.type_in("sleep 7004\n").await?;
    sandbox.sh("until pgrep -f 'sleep 700[4]' >/dev/null; do sleep 0.1; done").await?;
    screen.type_in("\u{3}").await?;
    // Input typed too early may be discarded with the interrupted line.
    screen.until("^C").await?;
    screen.until("# ").await?;
    screen.type_in("echo inter''rupted $?\n").await?;
    screen.until("interrupted 130").await?;

    paste(&mut screen).await?;

    // Detach with the keys and reattach: the same shell.
    screen.type_in("\u{1d}d").await?;
    let seen = screen.until("shell --attach=").await?;
    ensure!(seen.contains("detached; reattach with"), "{seen:?}");
    ensure!(screen.end().await? == Some(0), "leaving is no failure");
    let listed = keiki.json(&format!("ps {id}")).await?;
    ensure!(
        listed[0]["pty"] == true && listed[0]["status"] == "running" && listed[0]["attached"] == false,
        "{listed}"
    );
    let mut screen = Screen::open(&keiki, &format!("shell --attach {id}"), (100, 30))?;
    screen.type_in("echo $x-$((40+2)); stty size\n").await?;
    screen.until("kept-42").await?;
    screen.until("30 100").await?;
    screen.type_in("exit 5\n").await?;
    ensure!(screen.end().await? == Some(5), "the shell's exit code");
    let none = keiki.said(&format!("ps -q {id}")).await?;
    ensure!(none.out.is_empty(), "a terminal still runs: {}", none.out);

    // Killed from outside, it hangs up its shell and restores the terminal.
    let mut screen = Screen::open(&keiki, &format!("shell {id} sleep 7003"), (80, 24))?;
    sandbox.sh("until pgrep -f 'sleep 700[3]' >/dev/null; do sleep 0.1; done").await?;
    signal(&screen.child, Signal::TERM)?;
    screen.seen.clear();
    ensure!(screen.end().await? == Some(143), "ended by SIGTERM");
    sandbox
        .sh("for n in $(seq 50); do pgrep -f 'sleep 700[3]' >/dev/null || exit 0; sleep 0.1; done; exit 1")
        .await?;
    Ok(())
}

/// A paste of a mebibyte arrives whole.
async fn paste(screen: &mut Screen) -> Result<()> {
    let text: String = (0..40_000u32).map(|n| format!("{n:06} {:019}\n", u64::from(n) * 7_919)).collect();
    ensure!(text.len() > 1 << 20, "{} bytes", text.len());
    let line =
        format!("stty raw -echo; echo g''o; head -c {} | cksum; stty sane; echo pas''ted\n", text.len());
    screen.type_in(&line).await?;
    screen.until("go").await?;
    screen.type_in(&text).await?;
    let seen = screen.until("pasted").await?;
    ensure!(seen.contains(&format!("{} {}", cksum(&text).await?, text.len())), "it came otherwise: {seen:?}");
    Ok(())
}

async fn cksum(text: &str) -> Result<String> {
    let mut sum = Command::new("cksum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    sum.stdin.take().context("no input")?.write_all(text.as_bytes()).await?;
    let out = sum.wait_with_output().await?.stdout;
    Ok(String::from_utf8_lossy(&out).split(' ').next().unwrap_or_default().to_owned())
}

/// The program is killed, then the node: each time the next run continues with what is there.
pub async fn a_killed_template_build_is_gone_on_with(world: Arc<World>) -> Result<()> {
    let mut node = Node::start(&world.places, Options::named("programs").store_gib(3)).await?;
    let keiki = Keiki::of(&world, &node);
    let mut build = keiki.running("template build base")?;
    // Without a terminal, progress is a line per step.
    next_line(&mut build).await?;
    build.end(Signal::KILL).await?;
    let begun = node.client.builds().await?;
    ensure!(begun.len() == 1 && begun[0].ended_at.is_empty(), "the build ended with its watcher: {begun:?}");
    let mut again = keiki.running("template build base")?;
    // The guest boots: everything built from packages exists.
    while !next_line(&mut again).await?.contains("boot") {}
    ensure!(node.client.builds().await?.len() == 1, "it was begun anew");

    node.kill().await?;
    let mut said = String::new();
    while let Some(line) = again.err.next_line().await? {
        said.push_str(&line);
    }
    let ended = tokio::time::timeout(soon(), again.child.wait())
        .await
        .context("it waits for a node that is gone")??;
    ensure!(ended.code() == Some(125) && !said.is_empty(), "{ended}: {said:?}");
    node = node.restart().await?;
    let keiki = Keiki::of(&world, &node);
    let built: Said = keiki.command(["template", "build", "base"]).output().await?.into();
    ensure!(built.code == Some(0) && built.out == "template base is ready", "{}{}", built.out, built.err);
    ensure!(built.err.contains("boot") && built.err.contains("done: base version"), "{}", built.err);
    ensure!(!built.err.contains("downloading"), "what was there was made again: {}", built.err);
    let version = |listed: &Value| listed[0]["version"].as_str().unwrap_or_default().to_owned();
    let only_base = async || -> Result<Value> {
        let mut listed = keiki.json("template ls").await?;
        listed.as_array_mut().context("no list")?.retain(|template| template["name"] == "base");
        Ok(listed)
    };
    let before = only_base().await?;
    ensure!(before[0]["status"] == "ready", "{before}");
    let same = keiki.said("template build base").await?;
    ensure!(same.code == Some(0) && same.err.contains("nothing to do"), "{}", same.err);
    let rebaked: Said = keiki.command(["template", "rebake", "base"]).output().await?.into();
    ensure!(
        rebaked.code == Some(0) && rebaked.out == "template base is ready",
        "{}{}",
        rebaked.out,
        rebaked.err
    );
    ensure!(version(&only_base().await?) != version(&before), "it was not baked again");
    ensure!(keiki.out("run cat /etc/hostname").await?.len() > 1, "what was baked again does not work");
    node.finish().await
}

/// The next line of progress.
async fn next_line(running: &mut Running) -> Result<String> {
    let line =
        tokio::time::timeout(soon() * 5, running.err.next_line()).await.context("no progress is shown")??;
    line.context("it ended without a word")
}
