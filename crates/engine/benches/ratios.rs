//! Two things of one run against each other, with real guests: `make bench-lab`. Writes `bench-lab.json`, in the shape of
//! `keiki bench`. Where the machine is emulated the times say nothing; the ratios say what forking saves.
//!
//! - `create_vs_cold_boot`: boot to first guest output, over thaw of a resident template to first guest output
//! - `pause_vs_full_copy`: writing all of a machine's memory to a file, over how long its vCPUs stood still in a freeze
//! - `pause_growth_256m_1g`: that pause with 1 GiB of memory, over the same with 256 MiB, equal parts of it written to
//! - `pause_fragmented_fsync`: that pause on a disk of 40,000 extents whose guest writes and flushes without end, over the
//!   same on the same disk when it is idle
//! - `pause_while_persisting`: that pause while the copy before is written down, over the same with that copy only kept

#[path = "../tests/guest/mod.rs"]
mod guest;

use anyhow::{Context, Result, ensure};
use guest::{Guest, Lab, lab};
use keiki_engine::{BootSpec, Machine};
use keiki_sys::stopwatch::Steps;
use keiki_types::Shape;
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

const BOOTS: usize = 3;
const SAMPLES: usize = 10;
const DIRTY_MIB: u32 = 64;
/// Every second page of the disk has data: each is an extent of its own.
const EXTENTS: u64 = 40_000;
const PAGE: u64 = 4096;
/// How often the guest is asked until it answers: what came before it looked at its port is lost.
const ASK: Duration = Duration::from_millis(5);
/// In which a load is under way.
const SETTLED: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(120);

fn shape(memory_mib: u32) -> Shape {
    Shape { memory_mib, ..guest::SHAPE }
}

/// Asks a shell in the guest until it answers.
async fn first_output(machine: &dyn Machine) -> Result<()> {
    let mut stream = UnixStream::connect(machine.agent_socket()).await?;
    let mark = format!("<<{}>>", machine.paths().dir.display());
    let question = format!("echo '{mark}'\n");
    let asking = async {
        let (mut seen, mut buffer) = (Vec::<u8>::new(), [0_u8; 4096]);
        loop {
            stream.write_all(question.as_bytes()).await?;
            if let Ok(count) = timeout(ASK, stream.read(&mut buffer)).await {
                let count = count?;
                ensure!(count > 0, "the agent port closed");
                seen.extend(buffer.iter().take(count));
                if seen.windows(mark.len()).any(|bytes| bytes == mark.as_bytes()) {
                    return Ok(());
                }
            }
        }
    };
    timeout(PATIENCE, asking).await.context("the guest does not answer")?
}

async fn boot(lab: &Lab, memory_mib: u32) -> Result<(Box<dyn Machine>, f64)> {
    boot_as(lab, BootSpec { shape: shape(memory_mib), ..lab.spec() }).await
}

async fn boot_as(lab: &Lab, spec: BootSpec) -> Result<(Box<dyn Machine>, f64)> {
    let paths = lab.paths()?;
    let begun = Instant::now();
    let machine = lab.engine.boot(&spec, paths).await?;
    first_output(machine.as_ref()).await?;
    Ok((machine, ms(begun.elapsed())))
}

async fn boots(lab: &Lab) -> Result<Vec<f64>> {
    let mut samples = Vec::new();
    for _ in 0..BOOTS {
        let (machine, took) = boot(lab, 256).await?;
        samples.push(took);
        machine.stop().await?;
    }
    Ok(samples)
}

/// Samples of each step of an operation, by name, in order.
#[derive(Default)]
struct StepSamples(Vec<(String, Vec<f64>)>);

impl StepSamples {
    fn add(&mut self, name: &str, took: Duration) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, samples)) => samples.push(ms(took)),
            None => self.0.push((name.to_owned(), vec![ms(took)])),
        }
    }

    fn add_all(&mut self, steps: &Steps) {
        steps.0.iter().for_each(|(name, took)| self.add(name, *took));
    }

    /// One result for each step.
    fn measured(&self, name: &str, params: &Value) -> Vec<Value> {
        let of = |(step, samples): &(String, Vec<f64>)| {
            let mut params = params.clone();
            params["step"] = json!(step);
            measured(name, "ms", &params, samples)
        };
        self.0.iter().map(of).collect()
    }
}

async fn creates(lab: &Lab) -> Result<(Vec<f64>, StepSamples)> {
    let (template, _) = boot(lab, 256).await?;
    let image = lab.engine.image(&lab.fresh("f")?, shape(256)).await?;
    let (frozen, _) = template.freeze(image).await?;
    template.stop().await?;
    let (mut samples, mut steps) = (Vec::new(), StepSamples::default());
    for _ in 0..SAMPLES {
        let paths = lab.paths()?;
        let begun = Instant::now();
        let prepared = lab.engine.prepare(frozen.image(), paths).await?;
        steps.add("prepare", begun.elapsed());
        let (machine, of_thaw) = frozen.thaw(prepared).await?;
        let thawed = Instant::now();
        first_output(machine.as_ref()).await?;
        samples.push(ms(begun.elapsed()));
        steps.add_all(&of_thaw);
        steps.add("answer", thawed.elapsed());
        machine.stop().await?;
    }
    Ok((samples, steps))
}

async fn pauses(lab: &Lab, memory_mib: u32) -> Result<Vec<f64>> {
    let (machine, _) = boot(lab, memory_mib).await?;
    let mut guest = Guest::connect(machine).await?;
    let fill = format!("dd if=/dev/zero of=/tmp/dirty bs=1M count={DIRTY_MIB} 2>/dev/null");
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        guest.sh(&fill).await?;
        let image = lab.engine.image(&lab.fresh("f")?, shape(memory_mib)).await?;
        let (_, report) = guest.machine.freeze(image).await?;
        samples.push(ms(report.vcpu_pause));
    }
    guest.machine.stop().await?;
    Ok(samples)
}

/// A disk in as many pieces as a disk is after years.
fn fragmented(lab: &Lab) -> Result<PathBuf> {
    let path = lab.dir.path().join("fragmented.raw");
    let file = File::create(&path)?;
    let size = (EXTENTS * 2 * PAGE).next_multiple_of(1 << 20);
    file.set_len(size.max(u64::from(FRAGMENTED.disk_mib) << 20))?;
    for extent in 0..EXTENTS {
        file.write_all_at(&[0x5a; PAGE as usize], extent * 2 * PAGE)?;
    }
    file.sync_all()?;
    Ok(path)
}

const FRAGMENTED: Shape = Shape { disk_mib: 320, ..guest::SHAPE };

/// Pauses of a machine on a disk in pieces: idle, and under writes that are flushed each.
async fn disk_pauses(lab: &Lab) -> Result<(Vec<f64>, Vec<f64>)> {
    const LOAD: &str = "n=0; while :; do n=$(((n * 1103515245 + 12345) % 65536)); \
        dd if=/dev/zero of=/dev/vda bs=4k count=4 seek=$n conv=notrunc,fsync 2>/dev/null; done & echo $!";
    let spec = BootSpec { shape: FRAGMENTED, disk: fragmented(lab)?, ..lab.spec() };
    let (machine, _) = boot_as(lab, spec).await?;
    let mut guest = Guest::connect(machine).await?;
    let pause = async |guest: &mut Guest| -> Result<f64> {
        let (_, report) = lab.freeze(guest.machine.as_ref()).await?;
        Ok(ms(report.vcpu_pause))
    };
    let (mut idle, mut loaded) = (Vec::new(), Vec::new());
    // In turns, so that both are of chains of the same length.
    for _ in 0..SAMPLES {
        idle.push(pause(&mut guest).await?);
        let load = guest.sh(LOAD).await?;
        tokio::time::sleep(SETTLED).await;
        loaded.push(pause(&mut guest).await?);
        guest.sh(&format!("kill {load}; wait {load} 2>/dev/null; sync; true")).await?;
    }
    guest.machine.stop().await?;
    Ok((idle, loaded))
}

/// Pauses and the steps of their freezes.
type Pauses = (Vec<f64>, StepSamples);

/// Pauses while a copy of before is kept, and while it is written down: either way the guest has written all anew since.
async fn persist_pauses(lab: &Lab) -> Result<[Pauses; 2]> {
    let (machine, _) = boot(lab, 256).await?;
    let mut guest = Guest::connect(machine).await?;
    let fill = format!("dd if=/dev/urandom of=/tmp/dirty bs=1M count={DIRTY_MIB} 2>/dev/null");
    let mut both: [Pauses; 2] = Default::default();
    for _ in 0..SAMPLES {
        for (persists, (pauses, steps)) in both.iter_mut().enumerate() {
            guest.sh(&fill).await?;
            let (kept, _) = lab.freeze(guest.machine.as_ref()).await?;
            guest.sh(&fill).await?;
            let persist = async { if persists == 1 { kept.persist().await.map(drop) } else { Ok(()) } };
            let (persisted, frozen) = tokio::join!(persist, lab.freeze(guest.machine.as_ref()));
            persisted?;
            let (_, report) = frozen?;
            pauses.push(ms(report.vcpu_pause));
            steps.add_all(&report.steps);
            drop(kept);
            lab.engine.close().await;
        }
    }
    guest.machine.stop().await?;
    Ok(both)
}

/// What a snapshot that copies all of memory cannot do without.
fn full_copies(lab: &Lab) -> Result<Vec<f64>> {
    let memory = vec![0x5a_u8; 256 << 20];
    let path = lab.dir.path().join("copy");
    let mut samples = Vec::new();
    for _ in 0..BOOTS {
        let begun = Instant::now();
        let mut file = File::create(&path)?;
        file.write_all(&memory)?;
        file.sync_all()?;
        samples.push(ms(begun.elapsed()));
    }
    Ok(samples)
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The nearest-rank percentile.
fn percentile(samples: &[f64], percent: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(percent * sorted.len()).div_ceil(100).max(1) - 1]
}

fn measured(name: &str, unit: &str, params: &Value, samples: &[f64]) -> Value {
    let at = |percent| percentile(samples, percent);
    json!({"name": name, "params": params, "n": samples.len(), "p50": at(50), "p90": at(90), "p99": at(99),
        "unit": unit})
}

async fn run(lab: &Lab) -> Result<Value> {
    let (boots, (creates, create_steps)) = (boots(lab).await?, creates(lab).await?);
    let (small, large) = (pauses(lab, 256).await?, pauses(lab, 1024).await?);
    let copies = full_copies(lab)?;
    let (idle, loaded) = disk_pauses(lab).await?;
    let [(kept, kept_steps), (beside, beside_steps)] = persist_pauses(lab).await?;
    let of = |over: &[f64], under: &[f64]| percentile(over, 50) / percentile(under, 50);
    let ratio = |name: &str, value: f64| measured(name, "ratio", &json!({}), &[value]);
    let params = |mib: u32| json!({"memory_mib": mib, "dirty_mib": DIRTY_MIB});
    let (copy, persist) = (json!({"beside": "copy"}), json!({"beside": "persist"}));
    let mut results = vec![
        ratio("create_vs_cold_boot", of(&boots, &creates)),
        ratio("pause_vs_full_copy", of(&copies, &small)),
        ratio("pause_growth_256m_1g", of(&large, &small)),
        ratio("pause_fragmented_fsync", of(&loaded, &idle)),
        ratio("pause_while_persisting", of(&beside, &kept)),
        measured("cold_boot_first_output", "ms", &json!({"memory_mib": 256}), &boots),
        measured("create_first_output", "ms", &json!({"memory_mib": 256}), &creates),
        measured("fork_pause", "ms", &params(256), &small),
        measured("fork_pause", "ms", &params(1024), &large),
        measured("full_copy", "ms", &json!({"memory_mib": 256}), &copies),
        measured("fork_pause", "ms", &json!({"disk_extents": EXTENTS, "load": "none"}), &idle),
        measured("fork_pause", "ms", &json!({"disk_extents": EXTENTS, "load": "fsync"}), &loaded),
        measured("fork_pause", "ms", &copy, &kept),
        measured("fork_pause", "ms", &persist, &beside),
    ];
    results.extend(create_steps.measured("create_step", &json!({"memory_mib": 256})));
    results.extend(kept_steps.measured("fork_step", &copy));
    results.extend(beside_steps.measured("fork_step", &persist));
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model =
        cpu.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(": "));
    let machine = json!({"cpu": model.map_or("", |(_, name)| name),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "ram_mib": keiki_sys::host::meminfo("MemTotal").unwrap_or(0) >> 20,
        "kernel": read("/proc/sys/kernel/osrelease").trim()});
    Ok(json!({"machine": machine, "engine": "kvm", "results": results}))
}

fn main() -> Result<()> {
    // Built and run with the tests too, which want no numbers.
    let Some(path) = std::env::var_os("KEIKI_BENCH_LAB") else {
        eprintln!("skipped: KEIKI_BENCH_LAB does not say where the results go");
        return Ok(());
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(async {
        let lab = lab()?.context("there is no guest to measure with")?;
        run(&lab).await
    })?;
    fs::write(path, format!("{report:#}\n"))?;
    println!("{report:#}");
    Ok(())
}
