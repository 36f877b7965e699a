//! What a fork costs: `make bench-vmm`. Writes `bench-vmm.json`, in the shape of `keiki bench`.
//!
//! The guest is a few bytes, so that the numbers are those of the monitor and the kernel. All
//! samples are kept and percentiles are samples.

#[path = "../tests/monitor/mod.rs"]
mod monitor;
#[path = "../../hv/tests/tiny/mod.rs"]
mod tiny;
#[path = "monitor/working_set.rs"]
mod working_set;

use keiki_control::{Reply, Request, Shape};
use keiki_hv::{
    GuestRam, HugePages, Kvm,
    fork::{Side, exit, fork},
};
use monitor::{COUNT, Monitor, PATIENCE, Stored, TestHost, borrow, host, thaw_request};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};
use vm_memory::{Bytes, GuestAddress};

/// Adds one to a word of each page from 16 MiB on, counts the rounds, and touches a port after
/// each.
fn dirtier(mib: u32) -> Vec<u8> {
    let end = (16 + mib) << 20;
    let mut code = vec![0xbf, 0, 0, 0, 1]; // mov edi, 16 MiB
    code.extend([0xff, 0x07]); // inc dword [edi]
    code.extend([0x81, 0xc7, 0, 0x10, 0, 0]); // add edi, 4096
    code.extend([0x81, 0xff]); // cmp edi, end
    code.extend(end.to_le_bytes());
    code.extend([0x72, 0xf0]); // jb the inc
    code.extend([0xff, 0x05, 0, 0x20, 0, 0]); // inc dword [COUNT]
    code.extend([0xe6, 0x80]); // out 0x80, al
    code.extend([0xeb, 0xe1]); // jmp the beginning
    code
}

/// Touches a port, over and over.
const TALKER: &[u8] = &[0xff, 0x05, 0x00, 0x20, 0x00, 0x00, 0xe6, 0x80, 0xeb, 0xf6];

struct Report(Vec<Value>);

impl Report {
    fn add(&mut self, name: &str, unit: &str, params: Value, mut samples: Vec<f64>) {
        samples.sort_by(f64::total_cmp);
        let at = |percent: usize| samples[((percent * samples.len()).div_ceil(100)).max(1) - 1];
        let (p50, p90, p99) = (at(50), at(90), at(99));
        println!("{name:24} p50 {p50:8.2} p90 {p90:8.2} p99 {p99:8.2} {unit:4} n {} {params}", samples.len());
        self.0.push(json!({"name": name, "params": params, "n": samples.len(),
            "p50": p50, "p90": p90, "p99": p99, "unit": unit}));
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// All is written once, and something more.
fn round(machine: &Monitor) {
    let (started, before) = (Instant::now(), machine.peek_at(COUNT));
    while machine.peek_at(COUNT) < before + 2 {
        assert!(started.elapsed() < PATIENCE, "the guest does not count");
        std::thread::sleep(Duration::from_micros(300));
    }
}

/// What guest memory lies over.
#[derive(Clone, Copy, PartialEq)]
enum Over {
    /// Nothing: the machine booted.
    Nothing,
    /// Holes of a stored one, whose guest left free what is written now.
    Holes,
    /// Data of a stored one.
    Data,
}

/// A machine that writes so many MiB over and over. One that was stored stood still until then.
fn writing(host: &TestHost, mib: u32, dirty: u32, over: Over) -> Monitor {
    let mut machine = host.try_boot(&dirtier(dirty), 1, mib).unwrap();
    machine.remember_ram(mib.into());
    if over == Over::Nothing {
        return machine;
    }
    if over == Over::Data {
        round(&machine);
    }
    assert_eq!(machine.call(&Request::Pause), Reply::Done);
    if over == Over::Holes {
        // As if it had written nothing yet.
        let zeroes = vec![0; 1 << 20];
        let start = machine.ram_start_of(mib.into());
        for at in 16..16 + u64::from(dirty) {
            machine.mem().write_all_at(&zeroes, start + (at << 20)).unwrap();
        }
    }
    let (mut zygote, _) = host.freeze(&mut machine);
    machine.kill();
    let (stored, _) = host.persist(&mut zygote, None);
    zygote.close();
    let shape = Shape { vcpus: 1, memory_mib: mib };
    let mut loaded = host.load(&Stored { shape, ..stored });
    let mut machine = host.thaw(&mut loaded);
    loaded.kill();
    machine.remember_ram(mib.into());
    machine
}

/// Each zygote ends at once, or, if it is `kept`, when everything was written once more.
fn pauses(host: &TestHost, report: &mut Report, name: &str, size: [u32; 2], over: Over, kept: bool) {
    let [mib, dirty] = size;
    let samples = if mib > 1024 { 20 } else { 40 };
    let mut machine = writing(host, mib, dirty, over);
    let bottom = host.dir.path().join("bottom.raw");
    let (mut pause, mut steps) = (Vec::new(), std::collections::BTreeMap::<String, Vec<f64>>::new());
    round(&machine);
    for _ in 0..samples {
        let (zygote, frozen) = host.freeze(&mut machine);
        pause.push(frozen.vcpu_pause_ns as f64 / 1e6);
        for step in frozen.steps {
            steps.entry(step.name).or_default().push(step.ns as f64 / 1e6);
        }
        if kept {
            round(&machine);
        }
        zygote.kill();
        round(&machine);
        host.flatten(&mut machine, &bottom);
    }
    let over = match over {
        Over::Nothing => "nothing",
        Over::Holes => "holes",
        Over::Data => "data",
    };
    let params = json!({"memory_mib": mib, "dirty_mib": dirty, "over": over, "zygote": if kept { "kept" } else { "ended" }});
    report.add(name, "ms", params.clone(), pause);
    for (step, samples) in steps {
        report.add(&format!("{name}_{step}"), "ms", params.clone(), samples);
    }
}

/// Beside a copy that is only kept, and beside the same that is written down.
fn beside_persist(host: &TestHost, report: &mut Report) {
    let mut machine = writing(host, 256, 64, Over::Nothing);
    let bottom = host.dir.path().join("bottom.raw");
    let mut both: [Vec<f64>; 2] = Default::default();
    for _ in 0..20 {
        for (persists, pauses) in both.iter_mut().enumerate() {
            round(&machine);
            let (mut kept, _) = host.freeze(&mut machine);
            round(&machine);
            let stored = host.to_store(&kept, 256);
            if persists == 1 {
                let own = kept.pid();
                host.begin_persist(&mut kept, &stored, own);
            }
            let (zygote, frozen) = host.freeze(&mut machine);
            pauses.push(frozen.vcpu_pause_ns as f64 / 1e6);
            if persists == 1 {
                let written = kept.client.answer(PATIENCE).unwrap().reply;
                assert!(
                    matches!(&written, Reply::Persisted(written) if written.pages >= 64 << 8),
                    "{written:?}"
                );
                [&stored.memory, &stored.state].into_iter().for_each(|file| fs::remove_file(file).unwrap());
            }
            [kept, zygote].iter().for_each(Monitor::kill);
            host.flatten(&mut machine, &bottom);
        }
    }
    for (beside, pauses) in ["copy", "persist"].into_iter().zip(both) {
        report.add("fork_pause", "ms", json!({"memory_mib": 256, "dirty_mib": 64, "beside": beside}), pauses);
    }
}

fn tax(host: &TestHost, report: &mut Report) {
    let mut machine = host.try_boot(&dirtier(64), 1, 256).unwrap();
    machine.remember_ram(256);
    let bottom = host.dir.path().join("bottom.raw");
    let next = |machine: &Monitor| {
        let (started, before) = (Instant::now(), machine.peek_at(COUNT));
        while machine.peek_at(COUNT) == before {
            std::thread::sleep(Duration::from_micros(100));
        }
        started.elapsed()
    };
    let faults = |machine: &Monitor| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", machine.pid())).unwrap();
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(7).unwrap().parse::<f64>().unwrap()
    };
    let (mut steady, mut after, mut taken) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..20 {
        round(&machine);
        next(&machine);
        steady.push(ms(next(&machine)));
        let (zygote, _) = host.freeze(&mut machine);
        let before = faults(&machine);
        next(&machine);
        after.push(ms(next(&machine)));
        taken.push(faults(&machine) - before);
        zygote.kill();
        host.flatten(&mut machine, &bottom);
    }
    let params = json!({"memory_mib": 256, "dirty_mib": 64});
    report.add("post_fork_tax_steady", "ms", params.clone(), steady);
    report.add("post_fork_tax", "ms", params.clone(), after);
    report.add("post_fork_faults", "n", params, taken);
}

fn first_exit(host: &TestHost, report: &mut Report) {
    let mut machine = host.try_boot(TALKER, 1, 256).unwrap();
    let bottom = host.dir.path().join("bottom.raw");
    let (mut whole, mut steps) = (Vec::new(), std::collections::BTreeMap::<String, Vec<f64>>::new());
    for _ in 0..30 {
        let started = Instant::now();
        let (mut zygote, _) = host.freeze(&mut machine);
        let (copy, thawed) = host.try_thaw(&mut zygote).unwrap();
        while copy.console().is_empty() {}
        whole.push(ms(started.elapsed()));
        for step in thawed.steps {
            steps.entry(step.name).or_default().push(step.ns as f64 / 1e6);
        }
        copy.kill();
        zygote.kill();
        host.flatten(&mut machine, &bottom);
    }
    report.add("fork_first_exit", "ms", json!({"memory_mib": 256}), whole);
    for (step, samples) in steps {
        report.add(&format!("thaw_{step}"), "ms", json!({"memory_mib": 256}), samples);
    }
}

/// Waits for an interrupt that never comes.
const IDLE: &[u8] = &[0xff, 0x05, 0x00, 0x20, 0x00, 0x00, 0xf4, 0xeb, 0xf7];

/// Eight copies of one zygote at once, until each runs. Their guest is idle: eight that are not
/// would measure the scheduler.
fn eight(host: &TestHost, report: &mut Report) {
    let mut machine = host.try_boot(IDLE, 1, 256).unwrap();
    let (mut zygote, _) = host.freeze(&mut machine);
    machine.kill();
    let mut samples = Vec::new();
    for _ in 0..15 {
        let prepared: Vec<_> = (0..8).map(|_| host.copy_files(&zygote)).collect();
        let started = Instant::now();
        for (_, fds) in &prepared {
            zygote.client.ask(&thaw_request(), &borrow(fds)).unwrap();
        }
        let pids: Vec<u32> = prepared.iter().map(|_| zygote.client.answer(PATIENCE).unwrap().pid).collect();
        samples.push(ms(started.elapsed()));
        for pid in pids {
            keiki_sys::process::Process::open(pid).unwrap().unwrap().kill().unwrap();
        }
    }
    report.add("thaw8", "ms", json!({"memory_mib": 256}), samples);
}

fn private(host: &TestHost, report: &mut Report) {
    let mut machine = host.try_boot(&dirtier(64), 1, 256).unwrap();
    machine.remember_ram(256);
    round(&machine);
    assert_eq!(machine.call(&Request::Pause), Reply::Done);
    let (mut zygote, _) = host.freeze(&mut machine);
    let mut samples = Vec::new();
    for _ in 0..8 {
        let mut copy = host.thaw(&mut zygote);
        assert_eq!(copy.call(&Request::Pause), Reply::Done);
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", copy.pid())).unwrap();
        let field = |name: &str| {
            let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
        };
        let start = copy.ram_start_of(256);
        samples.push(field("Private_Dirty:") + field("Private_Clean:") - copy.private_of_mapping(start));
    }
    report.add("child_private_mib", "MiB", json!({"memory_mib": 256}), samples);
}

/// Of the bare fork: a process with this much RAM, all of it touched.
fn full(report: &mut Report, gib: u64, huge: HugePages) {
    let ram = GuestRam::anonymous(gib << 30, huge).unwrap();
    for span in ram.spans() {
        for page in (span.guest..span.guest + span.len).step_by(4096) {
            ram.memory().write_obj(1_u8, GuestAddress(page)).unwrap();
        }
    }
    let kvm = Kvm::open().unwrap();
    let _vm = kvm.create_vm(&ram).unwrap();
    let mut samples = Vec::new();
    for _ in 0..10 {
        let started = Instant::now();
        match fork(&[]).unwrap() {
            Side::Child => exit(0),
            Side::Parent { child } => {
                samples.push(ms(started.elapsed()));
                let pid = rustix::process::Pid::from_raw(child as i32);
                let _ = rustix::process::waitpid(pid, rustix::process::WaitOptions::empty());
            }
        }
    }
    let params = json!({"memory_mib": gib << 10, "huge_pages": huge == HugePages::Advise});
    report.add(&format!("fork_pause_{gib}g_full"), "ms", params, samples);
}

fn machine() -> Value {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let model =
        cpu.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(": "));
    let kib = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
    json!({"cpu": model.map_or("", |(_, name)| name),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "ram_mib": kib >> 10,
        "kernel": read("/proc/sys/kernel/osrelease").trim()})
}

fn main() {
    // Cargo says `--bench`; names may follow to run some.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    let Some(host) = host() else { return };
    let mut report = Report(Vec::new());
    const OVER: [(Over, bool); 4] =
        [(Over::Nothing, false), (Over::Holes, false), (Over::Holes, true), (Over::Data, false)];
    if is_wanted("fork_pause") {
        for (over, kept) in OVER {
            pauses(&host, &mut report, "fork_pause", [256, 64], over, kept);
        }
    }
    if is_wanted("fork_pause_beside") {
        beside_persist(&host, &mut report);
    }
    if is_wanted("fork_first_exit") {
        first_exit(&host, &mut report);
    }
    if is_wanted("thaw8") {
        eight(&host, &mut report);
    }
    if is_wanted("fork_pause_4g") {
        for (over, kept) in OVER {
            pauses(&host, &mut report, "fork_pause_4g", [4096, 512], over, kept);
        }
    }
    if is_wanted("child_private_mib") {
        private(&host, &mut report);
    }
    if is_wanted("post_fork_tax") {
        tax(&host, &mut report);
    }
    if is_wanted("working_set") {
        working_set::measure(&host, &mut report);
    }
    for huge in [HugePages::No, HugePages::Advise] {
        for gib in [1, 4, 8].into_iter().filter(|gib| is_wanted(&format!("fork_pause_{gib}g_full"))) {
            full(&mut report, gib, huge);
        }
    }
    let report = json!({"machine": machine(), "engine": "kvm", "results": report.0});
    let path = std::env::var("KEIKI_BENCH_VMM").unwrap_or_else(|_| "bench-vmm.json".into());
    fs::write(&path, format!("{report:#}\n")).unwrap();
    println!("{path}");
}
