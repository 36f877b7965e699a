//! Comparison of two reports.

use super::report::{Measured, Report};
use serde::Serialize;
use serde_json::{Map, Value};

/// One metric in both reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    pub name: String,
    pub params: Map<String, Value>,
    /// `ms`, `MiB` or `ratio`.
    pub unit: String,
    /// Median in the earlier report.
    pub before: f64,
    /// Median now.
    pub now: f64,
    /// Now divided by before: above 1 is slower or larger.
    pub ratio: f64,
    pub verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Ratio above the threshold.
    Worse,
    Same,
    /// Ratio below the inverse of the threshold.
    Better,
}

impl Verdict {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Worse => "worse",
            Self::Same => "",
            Self::Better => "better",
        }
    }
}

/// Compares the medians of everything both reports measured under the same conditions.
pub fn compare(before: &Report, now: &Report, threshold: f64) -> Vec<Comparison> {
    let pairs = now.results.iter().filter_map(|result| {
        let known = before.results.iter().find(|known| known.is_same(result) && known.unit == result.unit)?;
        Some((known, result))
    });
    pairs.map(|(before, now)| one(before, now, threshold)).collect()
}

fn one(before: &Measured, now: &Measured, threshold: f64) -> Comparison {
    let ratio = ratio(before.p50, now.p50);
    let verdict = match ratio {
        _ if ratio > threshold => Verdict::Worse,
        _ if ratio < 1.0 / threshold => Verdict::Better,
        _ => Verdict::Same,
    };
    Comparison {
        name: now.name.clone(),
        params: now.params.clone(),
        unit: now.unit.clone(),
        before: before.p50,
        now: now.p50,
        ratio,
        verdict,
    }
}

/// 0 / 0 is 1.
fn ratio(before: f64, now: f64) -> f64 {
    if now == before { 1.0 } else { now / before }
}

#[cfg(test)]
mod tests {
    use super::{Verdict, compare};
    use crate::bench::{pick::Metric, report::tests::report};
    use serde_json::json;

    #[test]
    fn ratios_and_verdicts() {
        let metrics =
            [Metric::Kill, Metric::Snapshot, Metric::ExecRoundtrip, Metric::ForkPause, Metric::ForkTax];
        let of = |values: [f64; 5]| {
            report(&metrics.into_iter().zip(values).map(|(m, v)| (m, json!({}), v)).collect::<Vec<_>>())
        };
        let compared = compare(&of([10.0, 10.0, 10.0, 10.0, 0.0]), &of([12.5, 12.6, 8.0, 7.9, 0.0]), 1.25);
        let verdicts: Vec<_> = compared.iter().map(|one| one.verdict).collect();
        assert_eq!(verdicts, [Verdict::Same, Verdict::Worse, Verdict::Same, Verdict::Better, Verdict::Same]);
        assert_eq!((compared[1].before, compared[1].now), (10.0, 12.6));
        assert!((compared[1].ratio - 1.26).abs() < 1e-9);
        let from_nothing = compare(&of([0.0; 5]), &of([1.0, 0.0, 0.0, 0.0, 0.0]), 1.25);
        assert_eq!(from_nothing[0].verdict, Verdict::Worse);
    }

    #[test]
    fn only_the_same_under_the_same_conditions_is_compared() {
        let before = report(&[
            (Metric::ForkAll, json!({"children": 1}), 1.0),
            (Metric::ForkAll, json!({"children": 10}), 10.0),
            (Metric::Kill, json!({}), 1.0),
        ]);
        let now = report(&[
            (Metric::ForkAll, json!({"children": 10}), 30.0),
            (Metric::ForkAll, json!({"children": 32}), 99.0),
        ]);
        let compared = compare(&before, &now, 1.25);
        assert_eq!(compared.len(), 1);
        assert_eq!((compared[0].ratio, compared[0].verdict), (3.0, Verdict::Worse));
    }
}
