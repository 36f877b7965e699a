//! `keiki top`.

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome},
    ids::short,
    printer::table,
    signals::unless_interrupted,
    text,
};
use keiki_client::{SandboxId, Status, api::Sandbox};
use serde::Serialize;
use std::{
    collections::HashMap,
    io::IsTerminal,
    time::{Duration, Instant},
};
use time::OffsetDateTime;

/// Cursor home, then clear to the end of the screen, without flicker.
const REDRAW: &str = "\x1b[H\x1b[J";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one table and exit
    #[arg(long)]
    pub once: bool,
    /// Refresh interval
    #[arg(short, long, value_name = "DURATION", value_parser = text::parse_duration, default_value = "2s")]
    pub interval: Duration,
    /// Show whole ids
    #[arg(long)]
    pub full: bool,
}

#[derive(Debug, PartialEq, Serialize)]
struct Usage {
    id: SandboxId,
    template: String,
    status: Status,
    /// Of one core, since the previous sample.
    cpu_percent: Option<f64>,
    guest_bytes: Option<u64>,
    private_bytes: Option<u64>,
    shared_bytes: Option<u64>,
    pss_bytes: Option<u64>,
    created_at: String,
    idle_seconds: u64,
}

/// CPU times of all sandboxes at one moment.
struct Sample {
    at: Instant,
    cpu_ms: HashMap<SandboxId, u64>,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    // There is nothing to redraw without a screen.
    let once = args.once || !std::io::stdout().is_terminal();
    unless_interrupted(async {
        let (mut before, _) = sample(&context).await?;
        // A rate takes two samples: the second comes soon.
        let mut pause = args.interval.min(Duration::from_secs(1));
        loop {
            tokio::time::sleep(pause).await;
            pause = args.interval;
            let (now, sandboxes) = sample(&context).await?;
            let used: Vec<Usage> = sandboxes.iter().map(|sandbox| usage(sandbox, &before, &now)).collect();
            show(&context, &used, once, args.full)?;
            if once {
                return Ok(());
            }
            before = now;
        }
    })
    .await?;
    Ok(ExitCode::Success as i32)
}

async fn sample(context: &Context) -> Result<(Sample, Vec<Sandbox>), Failure> {
    let sandboxes = context.client.list(true).await?;
    let cpu_ms = sandboxes.iter().filter_map(|sandbox| Some((sandbox.id, sandbox.cpu_ms?))).collect();
    Ok((Sample { at: Instant::now(), cpu_ms }, sandboxes))
}

fn usage(sandbox: &Sandbox, before: &Sample, now: &Sample) -> Usage {
    let took = (now.at - before.at).as_secs_f64() * 1e3;
    let cpu_percent = now.cpu_ms.get(&sandbox.id).zip(before.cpu_ms.get(&sandbox.id)).map(|(now, before)| {
        // Less than before: a new machine, after hibernation.
        now.saturating_sub(*before) as f64 / took.max(1.0) * 100.0
    });
    Usage {
        id: sandbox.id,
        template: sandbox.template.clone(),
        status: sandbox.status,
        cpu_percent,
        guest_bytes: sandbox.memory.map(|memory| memory.guest_bytes),
        private_bytes: sandbox.memory.map(|memory| memory.private_bytes),
        shared_bytes: sandbox.memory.map(|memory| memory.shared_bytes),
        pss_bytes: sandbox.memory.map(|memory| memory.pss_bytes),
        created_at: sandbox.created_at.clone(),
        idle_seconds: sandbox.idle_seconds,
    }
}

fn show(context: &Context, used: &[Usage], once: bool, full: bool) -> Result<(), Failure> {
    if once && context.out.is_json() {
        return context.out.json(used);
    }
    let now = OffsetDateTime::now_utc();
    let headings = ["ID", "TEMPLATE", "STATUS", "CPU", "RAM", "PRIVATE", "SHARED", "PSS", "AGE", "IDLE"];
    let redraw = if once { "" } else { REDRAW };
    context.out.item(used, || {
        let rows = table(headings, used.iter().map(|usage| row(usage, now, full)));
        format!("{redraw}{rows}\n\n{}", summary(used))
    })
}

fn row(usage: &Usage, now: OffsetDateTime, full: bool) -> [String; 10] {
    let bytes = |count: Option<u64>| count.map_or_else(|| "-".into(), text::bytes);
    [
        if full { usage.id.to_string() } else { short(usage.id) },
        usage.template.clone(),
        usage.status.to_string(),
        usage.cpu_percent.map_or_else(|| "-".into(), |percent| format!("{percent:.0}%")),
        bytes(usage.guest_bytes),
        bytes(usage.private_bytes),
        bytes(usage.shared_bytes),
        bytes(usage.pss_bytes),
        text::age(&usage.created_at, now),
        text::span(usage.idle_seconds),
    ]
}

fn summary(used: &[Usage]) -> String {
    let sum = |of: fn(&Usage) -> Option<u64>| used.iter().filter_map(of).sum::<u64>();
    let cpu: f64 = used.iter().filter_map(|usage| usage.cpu_percent).sum();
    format!(
        "{} sandboxes, {} running; {cpu:.0}% CPU; {} of guest RAM cost {} (PSS)",
        used.len(),
        used.iter().filter(|usage| usage.status == Status::Running).count(),
        text::bytes(sum(|usage| usage.guest_bytes)),
        text::bytes(sum(|usage| usage.pss_bytes)),
    )
}

#[cfg(test)]
mod tests {
    use super::{Sample, usage};
    use keiki_client::api::Sandbox;
    use serde_json::json;
    use std::time::{Duration, Instant};

    #[test]
    fn cpu_is_what_was_used_since_the_previous_sample() {
        let sandbox: Sandbox = serde_json::from_value(json!({
            "id": "0190b7a0-0000-7000-8000-000000000001", "template": "base", "template_version": "",
            "cpu": 1, "memory_mb": 256, "disk_mb": 1, "status": "running", "guest_ip": "",
            "created_at": "", "metadata": {}, "from_snapshot": null, "boot_ms": 0,
            "boot_mode": "create", "persistent": false, "ttl_seconds": 1, "idle_seconds": 0,
            "parent_sandbox_id": null, "parent_snapshot_id": null, "generation": 1, "engine": "qemu"
        }))
        .unwrap();
        let begun = Instant::now();
        let at = |seconds, cpu: Option<u64>| Sample {
            at: begun + Duration::from_secs(seconds),
            cpu_ms: cpu.map(|cpu| (sandbox.id, cpu)).into_iter().collect(),
        };
        let percent = |before, now| usage(&sandbox, &at(0, before), &at(2, now)).cpu_percent;
        assert_eq!(percent(Some(1000), Some(2000)), Some(50.0));
        assert_eq!(percent(Some(1000), Some(10)), Some(0.0), "a new machine");
        assert_eq!(percent(None, Some(10)), None, "no earlier sample");
        assert_eq!(percent(Some(10), None), None, "not measured");
    }
}
