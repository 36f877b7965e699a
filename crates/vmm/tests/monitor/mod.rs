//! Real monitors with a guest of a few bytes, driven over their control sockets like a node drives
//! them.
#![allow(dead_code)]

#[path = "../../../../fuzz/bodies/overlay.rs"]
pub mod overlay;

use keiki_control::{
    Boot, Client, ControlError, Cpu, Devices, Disk, Frozen, Load, Persisted, Reply, Request, Role, Shape,
    Start, Thaw, Thawed, listen,
};
use keiki_sys::process::{Process, Setup};
use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::{fs::FileExt, net::UnixListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

pub const PATIENCE: Duration = Duration::from_secs(30);
pub const USER: u32 = 1_262_100_001;
pub const DISK: u64 = 16 << 20;
/// Where the guest counts.
pub const COUNT: u64 = 0x2000;

/// Counts, and prints the count as a letter A to Z and a line end, some hundred times a second.
#[rustfmt::skip]
pub const LETTERS: &[u8] = &[
    0xff, 0x05, 0x00, 0x20, 0x00, 0x00,       // inc dword [COUNT]
    0xa0, 0x04, 0x20, 0x00, 0x00,             // mov al, [COUNT + 4]
    0x04, 0x01,                               // add al, 1
    0x3c, 0x1a,                               // cmp al, 26
    0x72, 0x02,                               // jb +2
    0xb0, 0x00,                               // mov al, 0
    0xa2, 0x04, 0x20, 0x00, 0x00,             // mov [COUNT + 4], al
    0x04, 0x41,                               // add al, 'A'
    0x66, 0xba, 0xf8, 0x03,                   // mov dx, 0x3f8
    0xee,                                     // out dx, al
    0xb0, 0x0a,                               // mov al, '\n'
    0xee,                                     // out dx, al
    0xb9, 0x00, 0x10, 0x00, 0x00,             // mov ecx, 4096
    0x49,                                     // dec ecx
    0x75, 0xfd,                               // jnz -3
    0xeb, 0xce,                               // jmp the beginning
];

/// Counts as fast as it can, without a device.
pub const SILENT: &[u8] = &[0xff, 0x05, 0x00, 0x20, 0x00, 0x00, 0xeb, 0xf8];

/// Switches the machine off.
#[rustfmt::skip]
pub const OFF: &[u8] = &[
    0x66, 0xba, 0x00, 0x06,                   // mov dx, 0x600
    0xb0, 0x34,                               // mov al, sleep now, type 5
    0xee,                                     // out dx, al
    0xeb, 0xfe,                               // jmp here
];

/// Triple fault.
pub const CRASH: &[u8] = &[0x0f, 0x01, 0x1d, 0x00, 0x30, 0x00, 0x00, 0x0f, 0x0b]; // lidt [zeroes]; ud2

/// An ELF file that a PVH loader enters in 32-bit mode at 1 MiB.
pub fn kernel(code: &[u8]) -> Vec<u8> {
    const BASE: u64 = 0x10_0000;
    let mut note = Vec::new();
    for word in [4_u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend((BASE as u32).to_le_bytes());
    let (note_at, code_at) = (0x100_u64, 0x1000_u64);
    let mut file = vec![0; code_at as usize];
    file[..16].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let mut at = 16;
    let mut put = |bytes: &[u8]| {
        file[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(&2_u16.to_le_bytes());
    put(&62_u16.to_le_bytes());
    put(&1_u32.to_le_bytes());
    for word in [BASE, 64, 0] {
        put(&word.to_le_bytes());
    }
    put(&0_u32.to_le_bytes());
    for half in [64_u16, 56, 2, 0, 0, 0] {
        put(&half.to_le_bytes());
    }
    // Type and flags, then offset, addresses, sizes, alignment.
    let mut header = |kind: u32, at: u64, to: u64, len: u64| {
        put(&kind.to_le_bytes());
        put(&5_u32.to_le_bytes());
        for word in [at, to, to, len, len, 4] {
            put(&word.to_le_bytes());
        }
    };
    header(1, code_at, BASE, code.len() as u64);
    header(4, note_at, 0, note.len() as u64);
    file[note_at as usize..note_at as usize + note.len()].copy_from_slice(&note);
    file.extend(code);
    file
}

/// None, with a note, where no monitor can run.
pub fn host() -> Option<TestHost> {
    if let Err(error) = keiki_hv::Kvm::open() {
        keiki_testing::skip("kvm", format!("no KVM here: {error}"));
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    File::create(dir.path().join("bottom.raw")).unwrap().set_len(DISK).unwrap();
    std::fs::write(dir.path().join("empty.qcow2"), overlay::empty_overlay(DISK)).unwrap();
    Some(TestHost { dir, next: AtomicU32::new(0), tap: None, disks: Vec::new() })
}

/// A directory with the files of machines.
pub struct TestHost {
    pub dir: tempfile::TempDir,
    next: AtomicU32,
    /// The tap of the next machine.
    pub tap: Option<File>,
    /// Disks besides the root disk: bottom layer, and whether the disk is read-only.
    pub disks: Vec<(PathBuf, bool)>,
}

/// A monitor and the connection to it.
pub struct Monitor {
    pub process: Process,
    pub client: Client,
    pub files: Option<Files>,
    /// Address of guest memory, if it has been looked up.
    pub ram: Option<u64>,
}

/// The files of one machine.
#[derive(Clone)]
pub struct Files {
    pub socket: PathBuf,
    pub agent: PathBuf,
    pub console: PathBuf,
    /// Bottom first; the last is its top.
    pub layers: Vec<PathBuf>,
    /// The same for additional disks. Read-only disks have no top.
    pub disks: Vec<Vec<PathBuf>>,
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

impl TestHost {
    pub fn path(&self, kind: &str) -> PathBuf {
        self.dir.path().join(format!("{kind}-{}", self.next.fetch_add(1, Ordering::Relaxed)))
    }

    fn new_top(&self) -> PathBuf {
        let top = self.path("top");
        std::fs::copy(self.dir.path().join("empty.qcow2"), &top).unwrap();
        top
    }

    pub fn blank(&self) -> Monitor {
        self.blank_as(USER, 4096)
    }

    /// As this user, with at most `tasks` tasks.
    pub fn blank_as(&self, user: u32, tasks: u64) -> Monitor {
        let (client, theirs) = Client::pair().unwrap();
        let start = Start {
            control: std::os::fd::AsRawFd::as_raw_fd(&theirs),
            user: rustix::process::geteuid().is_root().then_some(user),
            files: 256,
            tasks,
            file_bytes: 64 << 30,
            oom_score_adj: 0,
            mark: "test".into(),
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_keiki-vmm"));
        let log = self.dir.path().join("stderr");
        let log = File::options().create(true).append(true).open(log).unwrap();
        command.args(start.to_args()).env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let setup = Setup { keep: vec![theirs], ..Setup::default() };
        let (process, _) = Process::spawn(&mut command, setup).unwrap();
        Monitor { process, client, files: None, ram: None }
    }

    /// The writable additional disks.
    fn writable(&self) -> impl Iterator<Item = usize> {
        let disks = self.disks.iter().enumerate();
        disks.filter(|(_, (_, read_only))| !read_only).map(|(number, _)| number)
    }

    /// The chains of the additional disks of a machine, each with a new top.
    fn with_tops(&self, mut disks: Vec<Vec<PathBuf>>) -> Vec<Vec<PathBuf>> {
        self.writable().for_each(|number| disks[number].push(self.new_top()));
        disks
    }

    fn new_files(&self, layers: Vec<PathBuf>, disks: Vec<Vec<PathBuf>>) -> (Files, Vec<(Role, OwnedFd)>) {
        let files = Files {
            socket: self.path("control"),
            agent: self.path("agent"),
            console: self.path("log"),
            layers,
            disks,
        };
        let mut fds: Vec<(Role, OwnedFd)> = vec![
            (Role::Listener, listen(&files.socket).unwrap()),
            (Role::Agent, UnixListener::bind(&files.agent).unwrap().into()),
            (Role::Console, open(&files.console).into()),
        ];
        let (top, lower) = files.layers.split_last().unwrap();
        fds.extend(lower.iter().map(|path| (Role::Layer, File::open(path).unwrap().into())));
        fds.push((Role::Top, open(top).into()));
        for (number, ((_, read_only), chain)) in (0..).zip(self.disks.iter().zip(&files.disks)) {
            let (lower, tops) = chain.split_at(chain.len() - usize::from(!read_only));
            fds.extend(lower.iter().map(|path| (Role::DiskLayer(number), File::open(path).unwrap().into())));
            fds.extend(tops.iter().map(|path| (Role::DiskTop(number), open(path).into())));
        }
        (files, fds)
    }

    pub fn try_boot(&self, code: &[u8], vcpus: u32, mib: u32) -> Result<Monitor, ControlError> {
        self.boot_in(self.blank(), code, vcpus, mib)
    }

    pub fn boot_in(
        &self,
        mut monitor: Monitor,
        code: &[u8],
        vcpus: u32,
        mib: u32,
    ) -> Result<Monitor, ControlError> {
        let disks = self.with_tops(self.disks.iter().map(|(bottom, _)| vec![bottom.clone()]).collect());
        let layers = vec![self.dir.path().join("bottom.raw"), self.new_top()];
        let (files, mut fds) = self.new_files(layers, disks);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&kernel(code)).unwrap();
        let mut initrd = tempfile::tempfile().unwrap();
        initrd.write_all(b"nothing").unwrap();
        fds.extend([
            (Role::Kvm, open(Path::new("/dev/kvm")).into()),
            (Role::Kernel, file.into()),
            (Role::Initrd, initrd.into()),
        ]);
        fds.extend(self.tap.iter().map(|tap| (Role::Tap, tap.try_clone().unwrap().into())));
        let boot = Request::Boot(Boot {
            shape: Shape { vcpus, memory_mib: mib },
            cmdline: String::new(),
            cpu: Cpu::Baseline,
            devices: Devices {
                mac: [2, 0, 0, 0, 0, 1],
                agent_port: "test".into(),
                disks: self.disks.iter().map(|(_, read_only)| Disk { read_only: *read_only }).collect(),
            },
            generation: [1; 16],
        });
        let reply = monitor.client.call(&boot, &borrow(&fds), PATIENCE)?.reply;
        assert_eq!(reply, Reply::Done);
        monitor.client = Client::connect(&files.socket)?;
        monitor.files = Some(files);
        Ok(monitor)
    }

    pub fn boot(&self, code: &[u8]) -> Monitor {
        self.try_boot(code, 1, 16).unwrap()
    }

    pub fn freeze(&self, machine: &mut Monitor) -> (Monitor, Frozen) {
        let top = self.new_top();
        self.try_freeze(machine, &top).unwrap()
    }

    pub fn try_freeze(&self, machine: &mut Monitor, top: &Path) -> Result<(Monitor, Frozen), ControlError> {
        let (client, theirs) = Client::pair().unwrap();
        let tops: Vec<_> = self.writable().map(|number| (number, self.new_top())).collect();
        let mut fds = vec![(Role::Control, theirs), (Role::Top, open(top).into())];
        fds.extend(tops.iter().map(|(number, top)| (Role::DiskTop(*number as u8), open(top).into())));
        let answer = machine.client.call(&Request::Freeze, &borrow(&fds), PATIENCE)?;
        let Reply::Frozen(frozen) = answer.reply else { panic!("{answer:?}") };
        let process = Process::open(frozen.pid).unwrap().unwrap();
        let files = machine.files.clone().unwrap();
        let own = machine.files.as_mut().unwrap();
        own.layers.push(top.to_owned());
        tops.into_iter().for_each(|(number, top)| own.disks[number].push(top));
        Ok((Monitor { process, client, files: Some(files), ram: None }, frozen))
    }

    /// Replaces all layers below the top with one raw layer.
    pub fn flatten(&self, machine: &mut Monitor, bottom: &Path) {
        let fds = [(Role::Layer, File::open(bottom).unwrap().into())];
        let reply = machine.client.call(&Request::Layers, &borrow(&fds), PATIENCE).unwrap().reply;
        assert_eq!(reply, Reply::Done);
        let layers = &mut machine.files.as_mut().unwrap().layers;
        layers.drain(..layers.len() - 1);
        layers.insert(0, bottom.to_owned());
    }

    pub fn try_thaw(&self, zygote: &mut Monitor) -> Result<(Monitor, Thawed), ControlError> {
        self.try_thaw_with(zygote, None)
    }

    pub fn try_thaw_with(
        &self,
        zygote: &mut Monitor,
        more: Option<(Role, OwnedFd)>,
    ) -> Result<(Monitor, Thawed), ControlError> {
        let (files, mut fds) = self.copy_files(zygote);
        fds.extend(more);
        fds.extend(self.tap.iter().map(|tap| (Role::Tap, tap.try_clone().unwrap().into())));
        let answer = zygote.client.call(&thaw_request(), &borrow(&fds), PATIENCE)?;
        let Reply::Thawed(thawed) = answer.reply else { panic!("{:?}", answer.reply) };
        assert_eq!(answer.pid, thawed.pid, "another process answered");
        Ok((self.adopt(thawed.pid, files), thawed))
    }

    /// A machine with this process id and these files.
    pub fn adopt(&self, pid: u32, files: Files) -> Monitor {
        let process = Process::open(pid).unwrap().unwrap();
        let client = Client::connect(&files.socket).unwrap();
        Monitor { process, client, files: Some(files), ram: None }
    }

    pub fn thaw(&self, zygote: &mut Monitor) -> Monitor {
        self.try_thaw(zygote).unwrap().0
    }

    pub fn copy_files(&self, zygote: &Monitor) -> (Files, Vec<(Role, OwnedFd)>) {
        let Files { mut layers, disks, .. } = zygote.files.clone().unwrap();
        layers.push(self.new_top());
        self.new_files(layers, self.with_tops(disks))
    }

    /// New files for a zygote with this much memory.
    pub fn to_store(&self, zygote: &Monitor, memory_mib: u32) -> Stored {
        Stored {
            memory: self.path("mem"),
            state: self.path("state"),
            digest: [0; 32],
            layers: zygote.files.as_ref().unwrap().layers.clone(),
            shape: Shape { vcpus: 1, memory_mib },
        }
    }

    /// Persists a zygote, over a base or over nothing.
    pub fn persist(&self, zygote: &mut Monitor, base: Option<&Path>) -> (Stored, Persisted) {
        let stored = self.to_store(zygote, 16);
        if let Some(base) = base {
            keiki_sys::sparse::copy(base, &stored.memory).unwrap();
        }
        let persisted = self.try_persist(zygote, &stored, zygote.process.pid()).unwrap();
        (Stored { digest: persisted.digest, ..stored }, persisted)
    }

    pub fn try_persist(
        &self,
        zygote: &mut Monitor,
        stored: &Stored,
        pagemap_of: u32,
    ) -> Result<Persisted, ControlError> {
        self.begin_persist(zygote, stored, pagemap_of);
        match zygote.client.answer(PATIENCE)?.reply {
            Reply::Persisted(persisted) => Ok(persisted),
            other => panic!("{other:?}"),
        }
    }

    /// Does not wait for the answer.
    pub fn begin_persist(&self, zygote: &mut Monitor, stored: &Stored, pagemap_of: u32) {
        let fds = [
            (Role::Memory, open(&stored.memory).into()),
            (Role::State, open(&stored.state).into()),
            (Role::Pagemap, File::open(format!("/proc/{pagemap_of}/pagemap")).unwrap().into()),
        ];
        zygote.client.ask(&Request::Persist, &borrow(&fds)).unwrap();
    }

    pub fn try_load(&self, stored: &Stored) -> Result<Monitor, ControlError> {
        let mut monitor = self.blank();
        let fds = [
            (Role::Kvm, open(Path::new("/dev/kvm")).into()),
            (Role::Memory, File::open(&stored.memory).unwrap().into()),
            (Role::State, File::open(&stored.state).unwrap().into()),
        ];
        let load = Request::Load(Load { shape: stored.shape, digest: stored.digest });
        let answer = monitor.client.call(&load, &borrow(&fds), PATIENCE)?;
        assert_eq!(answer.reply, Reply::Done);
        monitor.files = Some(Files {
            socket: PathBuf::new(),
            agent: PathBuf::new(),
            console: PathBuf::new(),
            layers: stored.layers.clone(),
            disks: Vec::new(),
        });
        Ok(monitor)
    }

    pub fn load(&self, stored: &Stored) -> Monitor {
        self.try_load(stored).unwrap()
    }
}

/// The files of a frozen machine.
#[derive(Clone)]
pub struct Stored {
    pub memory: PathBuf,
    pub state: PathBuf,
    pub digest: [u8; 32],
    pub layers: Vec<PathBuf>,
    pub shape: Shape,
}

pub fn thaw_request() -> Request {
    static NEXT: AtomicU32 = AtomicU32::new(7);
    let mut generation = [0; 16];
    generation[..4].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    Request::Thaw(Thaw { generation })
}

pub fn borrow(fds: &[(Role, OwnedFd)]) -> Vec<(Role, BorrowedFd<'_>)> {
    fds.iter().map(|(role, fd)| (*role, fd.as_fd())).collect()
}

/// A line of `/proc/PID/maps`.
struct Mapping {
    start: u64,
    len: u64,
    offset: u64,
    file: PathBuf,
}

impl Monitor {
    pub fn call(&mut self, request: &Request) -> Reply {
        self.client.call(request, &[], PATIENCE).unwrap().reply
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Takes the connection away.
    pub fn disconnect(&mut self) -> Client {
        std::mem::replace(&mut self.client, Client::pair().unwrap().0)
    }

    /// Reads guest memory from outside.
    pub fn peek(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.mem().read_exact_at(&mut bytes, self.ram_start() + at).unwrap();
        u32::from_le_bytes(bytes)
    }

    pub fn poke(&self, at: u64, value: u32) {
        self.mem().write_all_at(&value.to_le_bytes(), self.ram_start() + at).unwrap();
    }

    pub fn mem(&self) -> File {
        open(Path::new(&format!("/proc/{}/mem", self.pid())))
    }

    /// The only mapping of 16 MiB.
    pub fn ram_start(&self) -> u64 {
        self.ram_start_of(16)
    }

    /// Looks up the RAM of this size, which makes [`Monitor::peek_at`] fast.
    pub fn remember_ram(&mut self, mib: u64) {
        self.ram = Some(self.ram_start_of(mib));
    }

    pub fn peek_at(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.mem().read_exact_at(&mut bytes, self.ram.unwrap() + at).unwrap();
        u32::from_le_bytes(bytes)
    }

    /// Private MiB of the mapping at this address.
    pub fn private_of_mapping(&self, start: u64) -> f64 {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid())).unwrap();
        let from = smaps.find(&format!("{start:x}-")).unwrap();
        let lines = smaps[from..].lines().filter(|line| line.starts_with("Private_"));
        let kib = lines.take(2).filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
        kib.sum::<f64>() / 1024.0
    }

    /// Where the RAM of this size starts.
    pub fn ram_start_of(&self, mib: u64) -> u64 {
        self.ram_at(mib, 0)
    }

    /// Where this byte of a memory file lies in RAM of this size. Over nothing the kernel merges
    /// both spans into one mapping, with the span above the hole first. Over a file there are many
    /// mappings, each with its file and offset.
    pub fn ram_at(&self, mib: u64, at: u64) -> u64 {
        const BELOW_HOLE: u64 = 3 << 30;
        let (size, low) = (mib << 20, (mib << 20).min(BELOW_HOLE));
        let (is_low, high) = (at < low, size - low);
        let start_of = |mapping: &Mapping| {
            let is_file = || std::fs::metadata(&mapping.file).is_ok_and(|file| file.len() == size);
            match mapping.len {
                len if len == size => Some(mapping.start + if is_low { high } else { 0 }),
                len if len == if is_low { low } else { high } => Some(mapping.start),
                _ if (mapping.offset < low) == is_low && is_file() => {
                    Some(mapping.start - mapping.offset + if is_low { 0 } else { low })
                }
                _ => None,
            }
        };
        let start = self.mappings().iter().find_map(start_of);
        let start = start.unwrap_or_else(|| panic!("no RAM of {mib} MiB in {}", self.pid()));
        start + at - if is_low { 0 } else { low }
    }

    /// Mappings that may be guest memory: private and writable.
    fn mappings(&self) -> Vec<Mapping> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let lines = maps.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        lines
            .filter(|words| words[1] == "rw-p")
            .map(|words| {
                let (from, to) = words[0].split_once('-').unwrap();
                let file = words.get(5).copied().unwrap_or_default().into();
                Mapping { start: hex(from), len: hex(to) - hex(from), offset: hex(words[2]), file }
            })
            .collect()
    }

    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.files.as_ref().unwrap().console).unwrap()).into_owned()
    }

    /// Waits until the guest has counted further.
    pub fn counts(&self) {
        let before = self.peek(COUNT);
        until("the guest counts on", || self.peek(COUNT) != before);
    }

    pub fn kill(&self) {
        self.process.kill().unwrap();
        self.wait();
    }

    /// Closes the connection, which ends a zygote.
    pub fn close(mut self) {
        drop(self.disconnect());
        self.wait();
    }

    pub fn wait(&self) {
        until("it ends", || self.process.try_reap().is_some());
    }

    pub fn lives(&self) -> bool {
        self.process.try_reap().is_none()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.try_reap();
    }
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
