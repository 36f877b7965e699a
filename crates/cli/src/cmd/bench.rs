//! `keiki bench`.

use crate::{
    bench::{Bench, Metric, Report},
    context::Context,
    exit::{ExitCode, Outcome},
    owned::Owned,
    printer::table,
    progress::Progress,
    signals::unless_interrupted,
};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Samples of each metric
    #[arg(short, long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    pub n: u16,
    /// Measure only these
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES")]
    pub only: Vec<Metric>,
}

/// Runs the command. What it made is removed however it ends.
pub async fn run(context: Context, args: Args) -> Outcome {
    let owned = Owned::new(context.client.clone(), "bench");
    let progress = Progress::start("measuring");
    let bench = Bench {
        client: &context.client,
        owned: &owned,
        progress: &progress,
        out: context.out,
        n: args.n.into(),
        only: &args.only,
    };
    let measured = unless_interrupted(bench.run()).await;
    progress.say("cleaning up");
    let cleared = owned.clear().await;
    drop(progress);
    let report = measured?;
    context.out.show(&report, || text(&report))?;
    cleared?;
    Ok(ExitCode::Success as i32)
}

fn text(report: &Report) -> String {
    let machine = &report.machine;
    let rows = report.results.iter().map(|result| {
        let params: Vec<String> = result.params.iter().map(|(key, value)| format!("{key}={value}")).collect();
        [
            result.name.to_owned(),
            params.join(" ").replace('"', ""),
            result.n.to_string(),
            format!("{:.1}", result.p50),
            format!("{:.1}", result.p90),
            format!("{:.1}", result.p99),
            result.unit.to_owned(),
        ]
    });
    format!(
        "{}, {} cores, {} MiB RAM, Linux {}; engine {}\n\n{}",
        machine.cpu,
        machine.cores,
        machine.ram_mib,
        machine.kernel,
        report.engine,
        table(["NAME", "PARAMS", "N", "P50", "P90", "P99", "UNIT"], rows)
    )
}
