//! `keiki doctor`.

use crate::{
    doctor::{Check, Verdict, all},
    exit::{ExitCode, Outcome},
    printer::Printer,
};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Data directory of the node
    #[arg(long, value_name = "DIR", default_value = "/var/lib/keiki")]
    pub data_dir: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    checks: &'a [Check],
}

pub async fn run(out: Printer, args: Args) -> Outcome {
    let checks = all(&args.data_dir);
    let ok = checks.iter().all(|check| check.ok != Verdict::Fail);
    out.show(&Report { ok, checks: &checks }, || text(&checks))?;
    Ok(if ok { ExitCode::Success } else { ExitCode::Problems } as i32)
}

fn text(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for check in checks {
        let mark = match check.ok {
            Verdict::Ok => "ok  ",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        lines.push(format!("{mark}  {:<width$}  {}", check.name, check.detail));
        if !check.remedy.is_empty() {
            lines.push(format!("      {:<width$}  -> {}", "", check.remedy));
        }
    }
    let s = |count| if count == 1 { "" } else { "s" };
    let count = |verdict| checks.iter().filter(|check| check.ok == verdict).count();
    lines.push(match (count(Verdict::Fail), count(Verdict::Warn)) {
        (0, 0) => "This machine can run Keiki.".into(),
        (0, warnings) => format!("This machine can run Keiki, with {warnings} warning{}.", s(warnings)),
        (failures, _) => {
            format!("This machine cannot run Keiki yet: {failures} problem{} to fix.", s(failures))
        }
    });
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::text;
    use crate::doctor::Check;

    #[test]
    fn every_remedy_is_printed() {
        let checks =
            [Check::ok("a", "fine"), Check::warn("long name", "hm", "do x"), Check::fail("c", "no", "do y")];
        let text = text(&checks);
        assert!(text.contains("-> do x") && text.contains("-> do y"));
        assert!(text.ends_with("cannot run Keiki yet: 1 problem to fix."));
    }
}
