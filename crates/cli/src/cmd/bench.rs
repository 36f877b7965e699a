//! `keiki bench`.

use crate::{
    bench::{Bench, Comparison, Metric, Pick, Report, Size, Verdict, compare, conditions, svg},
    context::Context,
    exit::{ExitCode, Failure, Outcome, io_error},
    owned::Owned,
    printer::table,
    progress::Progress,
    signals::unless_interrupted,
};
use clap::ValueEnum;
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Samples per metric [default: 10, or 2 with --quick]
    #[arg(short, long, value_parser = clap::value_parser!(u16).range(1..))]
    pub n: Option<u16>,
    /// Measure only these metrics or groups, e.g. fork,kill (see --list)
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub only: Vec<Pick>,
    /// Take a minute or two: few samples, few machines, no cold page cache
    #[arg(long)]
    pub quick: bool,
    /// Template to create sandboxes from
    #[arg(long, value_name = "NAME")]
    pub template: Option<String>,
    /// Merge the results into this report
    #[arg(long, value_name = "FILE")]
    pub into: Option<PathBuf>,
    /// Take the results from this report instead of measuring
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "n", "quick", "into", "template"])]
    pub from: Option<PathBuf>,
    /// Compare with an earlier report; exit with 1 on a regression
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Ratio to the earlier median that counts as a regression
    #[arg(long, default_value_t = 1.25, value_name = "RATIO", value_parser = threshold, requires = "compare")]
    pub threshold: f64,
    /// Draw the results as an SVG file
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,
    /// Print the results as a Markdown table
    #[arg(long, conflicts_with = "list")]
    pub markdown: bool,
    /// List metrics
    #[arg(long)]
    pub list: bool,
}

/// The JSON output.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    comparison: Option<&'a [Comparison]>,
}

/// However this ends, it deletes what it created.
pub async fn run(context: Context, args: Args) -> Outcome {
    if args.list {
        return context.out.result(&list(), || table(["GROUP", "NAME", "UNIT", "DESCRIPTION"], list()));
    }
    // Fail on an unreadable file now, not minutes later.
    let before = args.compare.as_deref().map(read).transpose()?;
    let known = args.into.as_deref().filter(|path| path.exists()).map(read).transpose()?;
    let report = match &args.from {
        Some(path) => read(path)?,
        None => measure(&context, &args).await?,
    };
    let report = match known {
        Some(mut known) => {
            known.add(report);
            known
        }
        None => report,
    };
    if let Some(path) = &args.into {
        write(path, &(serde_json::to_string_pretty(&report).map_err(not_json)? + "\n"))?;
    }
    if let Some(path) = &args.chart {
        write(path, &svg(&report)?)?;
    }
    let comparison = before.map(|before| compare(&before, &report, args.threshold));
    let shown = Shown { report: &report, comparison: comparison.as_deref() };
    let page = || if args.markdown { markdown(&report) } else { text(&report, comparison.as_deref()) };
    context.out.show(&shown, page)?;
    verdict(&report, comparison.as_deref().unwrap_or_default())
}

async fn measure(context: &Context, args: &Args) -> Result<Report, Failure> {
    let owned = Owned::new(context.client.clone(), "bench");
    let progress = Progress::start("measuring");
    let n = |default| args.n.map_or(default, usize::from);
    let bench = Bench {
        client: &context.client,
        owned: &owned,
        progress: &progress,
        size: if args.quick { Size::quick(n(2)) } else { Size::full(n(10)) },
        only: &args.only,
        template: args.template.clone(),
        left_out: std::sync::Mutex::default(),
    };
    let measured = unless_interrupted(bench.run()).await;
    progress.set("cleaning up");
    let cleared = owned.clear().await;
    drop(progress);
    let report = measured?;
    cleared?;
    Ok(report)
}

/// 125 where the node failed at something, 1 for a regression.
fn verdict(report: &Report, comparison: &[Comparison]) -> Outcome {
    let failed: Vec<_> =
        report.left_out.iter().filter(|part| part.failed).map(|part| part.what.as_str()).collect();
    if !failed.is_empty() {
        return Err(Failure::Wrong(format!("cannot measure {}", failed.join(", "))));
    }
    let worse = comparison.iter().any(|one| one.verdict == Verdict::Worse);
    Ok(if worse { ExitCode::Problems } else { ExitCode::Success } as i32)
}

fn threshold(word: &str) -> Result<f64, String> {
    let ratio = word.parse::<f64>().ok().filter(|ratio| ratio.is_finite() && *ratio >= 1.0);
    ratio.ok_or_else(|| "must be a number of at least 1, such as 1.25".into())
}

fn read(path: &Path) -> Result<Report, Failure> {
    let what = format!("cannot read {}", path.display());
    let text = fs::read_to_string(path).map_err(io_error(what))?;
    serde_json::from_str(&text).map_err(|error| {
        Failure::Wrong(format!("{}: not a report of `keiki bench`: {error}", path.display()))
    })
}

/// Writes all or nothing: the file may hold the results of a long run.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let what = || format!("cannot write {}", path.display());
    fs::write(&new, text).and_then(|()| fs::rename(&new, path)).map_err(io_error(what()))
}

fn not_json(error: serde_json::Error) -> Failure {
    Failure::Wrong(format!("cannot encode the report: {error}"))
}

fn list() -> Vec<[String; 4]> {
    let row = |metric: &Metric| {
        let group = metric.group().to_possible_value();
        let group = group.map(|group| group.get_name().to_owned()).unwrap_or_default();
        [group, metric.name(), metric.unit().to_owned(), metric.about()]
    };
    Metric::value_variants().iter().map(row).collect()
}

/// Ratios are below one, where one digit would say little.
fn number(value: f64) -> String {
    if value < 1.0 { format!("{value:.2}") } else { format!("{value:.1}") }
}

fn rows(report: &Report) -> impl Iterator<Item = [String; 7]> {
    report.results.iter().map(|result| {
        let [p50, p90, p99] = [result.p50, result.p90, result.p99].map(number);
        let (name, unit) = (result.name.clone(), result.unit.clone());
        [name, conditions(&result.params), result.n.to_string(), p50, p90, p99, unit]
    })
}

fn markdown(report: &Report) -> String {
    let rows = rows(report).map(|row| format!("\n| {} |", row.join(" | ")));
    format!(
        "| name | params | n | p50 | p90 | p99 | unit |\n|---|---|---|---|---|---|---|{}",
        rows.collect::<String>()
    )
}

fn text(report: &Report, comparison: Option<&[Comparison]>) -> String {
    let machine = &report.machine;
    let mut page = format!(
        "{}, {} cores, {} MiB RAM, Linux {}; engine {}\n\n{}",
        machine.cpu,
        machine.cores,
        machine.ram_mib,
        machine.kernel,
        report.engine,
        table(["NAME", "PARAMS", "N", "P50", "P90", "P99", "UNIT"], rows(report))
    );
    if let Some(comparison) = comparison {
        let rows = comparison.iter().map(|one| {
            let (before, now) = (number(one.before), number(one.now));
            let (ratio, verdict) = (format!("{:.2}", one.ratio), one.verdict.as_str().to_owned());
            [one.name.clone(), conditions(&one.params), before, now, one.unit.clone(), ratio, verdict]
        });
        let compared = table(["NAME", "PARAMS", "BEFORE", "NOW", "UNIT", "RATIO", ""], rows);
        page = format!("{page}\n\n{compared}");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::threshold;

    #[test]
    fn thresholds_are_ratios() {
        assert_eq!(threshold("1.5"), Ok(1.5));
        for wrong in ["0.9", "NaN", "inf", "x", "25%"] {
            assert!(threshold(wrong).is_err(), "{wrong}");
        }
    }
}
