//! A guest in QEMU, for the tests beside this file.

use keiki_protocol::{
    client::Opened,
    generation::RESERVED,
    guest::{ExecEvent, ExecSpec, Exit, exec_event::Event, guest_client::GuestClient},
    handshake::Hello,
};
use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream as StdStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tokio::net::UnixStream;
use tonic::{Streaming, transport::Channel};

pub type Client = GuestClient<Channel>;

/// A QEMU process. Ended when dropped.
pub struct Machine {
    child: Child,
    dir: PathBuf,
    pub socket: PathBuf,
}

fn setting(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("set {name} (see tests/real_guest.rs)"))
}

/// On a busy host the emulated timer is too irregular for the kernel to measure its clocks by: it
/// fails to, and then waits for ever. So it is told.
fn clock() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("cpu MHz")).unwrap();
    let mhz: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
    format!("tsc_early_khz={:.0} tsc=reliable no_timer_check", mhz * 1000.0)
}

impl Machine {
    /// A cold boot on a fresh layer over the test disk, in `dir`.
    pub fn boot(dir: &Path) -> Self {
        let layer = dir.join("disk.qcow2");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
            .args([setting("KEIKI_TEST_DISK").as_str(), layer.to_str().unwrap()])
            .status()
            .unwrap();
        assert!(made.success());
        Self::start(dir, "a", None)
    }

    /// Another QEMU over the same layer that has loaded a saved state. It does not run yet.
    pub fn load(dir: &Path, name: &str, state: &Path) -> Self {
        let machine = Self::start(dir, name, Some(state));
        machine.control(name, |ask| {
            while ask(r#"{"execute":"query-status"}"#).contains("inmigrate") {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        machine
    }

    /// Lets it run.
    pub fn go_on(&self, name: &str) {
        self.control(name, |ask| drop(ask(r#"{"execute":"cont"}"#)));
    }

    fn start(dir: &Path, name: &str, state: Option<&Path>) -> Self {
        let at = |suffix: &str| dir.join(format!("{name}.{suffix}"));
        let console = fs::File::create(at("console")).unwrap();
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-M", "microvm,rtc=on,acpi=on", "-accel", "tcg", "-cpu", "max"])
            .args(["-m", "256", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-kernel", &setting("KEIKI_TEST_KERNEL"), "-initrd", &setting("KEIKI_TEST_INITRD")])
            .args(["-append", &format!("console=ttyS0 quiet panic=-1 reboot=t {RESERVED} {}", clock())])
            .args(["-serial", "stdio", "-device", "virtio-serial-device", "-device", "virtio-rng-device"])
            .args(["-chardev", &format!("socket,path={},server=on,wait=off,id=agent", at("agent").display())])
            .args(["-device", "virtserialport,chardev=agent,name=keiki.agent.0"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", at("qmp").display())])
            .args(["-drive", &format!("if=none,id=disk,format=qcow2,file={}/disk.qcow2", dir.display())])
            .args(["-device", "virtio-blk-device,drive=disk"])
            .args(["-netdev", "user,id=net,net=172.31.255.0/29,host=172.31.255.1,restrict=on"])
            .args(["-device", "virtio-net-device,netdev=net,mac=06:4b:49:4b:00:02"]);
        if let Some(state) = state {
            command.args(["-incoming", &format!("exec:cat {}", state.display())]);
        }
        command.stdin(Stdio::null()).stdout(console);
        let child = command.spawn().unwrap();
        let machine = Self { child, dir: dir.to_owned(), socket: at("agent") };
        // Its socket is the last that is made. One that is there may not listen yet.
        for _ in 0..500 {
            if StdStream::connect(at("qmp")).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        machine
    }

    /// What it said on its console.
    pub fn console(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.join(format!("{name}.console"))).unwrap()).into_owned()
    }

    /// A socket that its agent hears.
    pub async fn raw(&self) -> UnixStream {
        UnixStream::connect(&self.socket).await.unwrap()
    }

    /// A new connection to its agent, at the gate.
    pub async fn open(&self, generation: u64) -> (Opened, Hello) {
        match Opened::open(self.raw().await, generation, Duration::from_secs(40)).await {
            Ok((opened, met)) => (opened, met.hello),
            Err(error) => panic!("{error}\n{}", self.console("a")),
        }
    }

    /// And behind it.
    pub async fn connect(&self, generation: u64) -> (Client, Hello) {
        let (opened, hello) = self.open(generation).await;
        (opened.client().await.unwrap(), hello)
    }

    /// Speaks to QEMU.
    fn control(&self, name: &str, talk: impl FnOnce(&mut dyn FnMut(&str) -> String)) {
        let stream = StdStream::connect(self.dir.join(format!("{name}.qmp"))).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let mut ask = |text: &str| {
            (&stream).write_all(text.as_bytes()).unwrap();
            lines.by_ref().map(Result::unwrap).find(|line| line.contains("\"return\"")).unwrap()
        };
        ask(r#"{"execute":"qmp_capabilities"}"#);
        talk(&mut ask);
    }

    /// Stops it and writes its whole state, RAM included.
    pub fn save(&self, name: &str, state: &Path) {
        self.control(name, |ask| {
            ask(r#"{"execute":"stop"}"#);
            let target = state.display();
            ask(&format!(r#"{{"execute":"migrate","arguments":{{"uri":"exec:cat > {target}"}}}}"#));
            while !ask(r#"{"execute":"query-migrate"}"#).contains("\"completed\"") {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
    }

    /// Ended by itself?
    pub fn wait_end(&mut self, seconds: u64) -> bool {
        for _ in 0..seconds * 20 {
            if self.child.try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        false
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a command did.
#[derive(Debug, Default)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit: Exit,
    pub started: bool,
}

impl Outcome {
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

pub fn id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("x{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

pub fn shell(line: &str) -> ExecSpec {
    ExecSpec { id: id(), shell: line.to_owned().into(), ..ExecSpec::default() }
}

pub fn argv(words: &[&str]) -> ExecSpec {
    ExecSpec {
        id: id(),
        argv: words.iter().map(|word| word.to_string().into()).collect(),
        ..ExecSpec::default()
    }
}

pub async fn run(client: &Client, spec: ExecSpec) -> Outcome {
    let stream = client.clone().exec(spec).await.unwrap().into_inner();
    tokio::time::timeout(Duration::from_secs(120), collect(stream)).await.expect("the command hangs")
}

/// Takes a stream to its end and checks that offsets fit.
pub async fn collect(mut stream: Streaming<ExecEvent>) -> Outcome {
    let mut outcome = Outcome::default();
    let mut first = None;
    while let Some(event) = stream.message().await.unwrap() {
        match event.event.unwrap() {
            Event::Started(_) => outcome.started = true,
            Event::Stdout(output) => {
                let begin = *first.get_or_insert(output.offset);
                assert_eq!(output.offset, begin + outcome.stdout.len() as u64);
                outcome.stdout.extend_from_slice(&output.data);
            }
            Event::Stderr(output) => outcome.stderr.extend_from_slice(&output.data),
            Event::Exit(exit) => {
                outcome.exit = exit;
                assert!(stream.message().await.unwrap().is_none(), "something came after the exit");
                return outcome;
            }
        }
    }
    panic!("no exit event: {outcome:?}");
}
