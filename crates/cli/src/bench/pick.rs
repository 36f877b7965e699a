//! Metrics, and which of them to measure.

use clap::ValueEnum;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Metric {
    /// Create: request to running vCPUs, by the node's clock; page cache warm and cold
    RestoreStep,
    /// Create: release gate, from running vCPUs to running user processes; page cache warm and cold
    Release,
    /// Each step of the release gate; steps in the guest start with `guest:`
    ReleaseStep,
    /// Create, then `true`: request to first event; page cache warm and cold
    CreateFirstExec,
    /// Share of the release gate in create_first_exec; page cache warm and cold
    ReleaseShare,
    /// Delete: request to everything freed
    Kill,
    /// Many creates at once, until `true` has run in the last one
    CreateAll,
    /// Many deletes at once, until the last one is freed
    KillAll,
    /// `true` in a running sandbox: request to answer; idle and dirtying guests
    ExecRoundtrip,
    /// Fork: vCPU pause, with 64 MiB freshly dirtied; idle and dirtying guests
    ForkPause,
    /// Fork: pause of user processes, with 64 MiB freshly dirtied; idle and dirtying guests
    ForkUserPause,
    /// Fork, then `true` in the child: request to first event; idle and dirtying guests
    ForkFirstExec,
    /// Fork of eight, until `true` has run in each child
    #[value(name = "fork8_all")]
    Fork8All,
    /// Fork of 1, 10 and 32, until `true` has run in each child; idle and dirtying guests
    ForkAll,
    /// Time to rewrite 64 MiB: undisturbed, right after a fork, and in the child
    ForkTax,
    /// Memory of an idle child
    PssPerIdleChild,
    /// Memory of each of ten children, at start and after writing
    PssPerChild,
    /// Private part of pss_per_child
    PrivatePerChild,
    /// Fork of ten from a guest with a loaded model, until `true` has run in each child
    ModelForkAll,
    /// Memory of that guest and its ten children, together
    ModelPssSum,
    /// Snapshot: request to durable
    Snapshot,
    /// Restore, then `true`: request to first event; page cache warm and cold
    RestoreFirstExec,
    /// Cold boot of the template, measured when it was built, for comparison
    ColdBoot,
}

/// Metrics measured together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Group {
    Create,
    Exec,
    Fork,
    Memory,
    Model,
    Snapshot,
    Boot,
}

impl Metric {
    /// Name in reports and arguments.
    pub fn name(self) -> String {
        name_of(&self)
    }

    pub fn unit(self) -> &'static str {
        match self {
            Self::PssPerIdleChild | Self::PssPerChild | Self::PrivatePerChild | Self::ModelPssSum => "MiB",
            Self::ReleaseShare => "ratio",
            _ => "ms",
        }
    }

    pub fn group(self) -> Group {
        match self {
            Self::RestoreStep
            | Self::Release
            | Self::ReleaseStep
            | Self::ReleaseShare
            | Self::CreateFirstExec
            | Self::Kill
            | Self::CreateAll
            | Self::KillAll => Group::Create,
            Self::ExecRoundtrip => Group::Exec,
            Self::ForkPause
            | Self::ForkUserPause
            | Self::ForkFirstExec
            | Self::Fork8All
            | Self::ForkAll
            | Self::ForkTax => Group::Fork,
            Self::PssPerIdleChild | Self::PssPerChild | Self::PrivatePerChild => Group::Memory,
            Self::ModelForkAll | Self::ModelPssSum => Group::Model,
            Self::Snapshot | Self::RestoreFirstExec => Group::Snapshot,
            Self::ColdBoot => Group::Boot,
        }
    }

    /// One-line description.
    pub fn about(self) -> String {
        let help = self.to_possible_value().and_then(|value| value.get_help().map(ToString::to_string));
        help.unwrap_or_default()
    }
}

/// A metric or a group, for `--only`. `snapshot` is both, and means the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    Metric(Metric),
    Group(Group),
}

impl Pick {
    pub fn has(self, metric: Metric) -> bool {
        match self {
            Self::Metric(only) => only == metric,
            Self::Group(group) => group == metric.group(),
        }
    }
}

impl std::str::FromStr for Pick {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let group = Group::from_str(word, false).map(Self::Group);
        group.or_else(|_| Metric::from_str(word, false).map(Self::Metric)).map_err(|_| {
            let groups: Vec<_> = Group::value_variants().iter().map(name_of).collect();
            let metrics: Vec<_> = Metric::value_variants().iter().map(name_of).collect();
            format!("groups are {}; metrics are {}", groups.join(", "), metrics.join(", "))
        })
    }
}

fn name_of<T: ValueEnum>(value: &T) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{Group, Metric, Pick};
    use clap::ValueEnum;

    #[test]
    fn picks_are_metrics_or_groups() {
        assert_eq!("fork8_all".parse(), Ok(Pick::Metric(Metric::Fork8All)));
        assert_eq!("memory".parse(), Ok(Pick::Group(Group::Memory)));
        assert_eq!("snapshot".parse(), Ok(Pick::Group(Group::Snapshot)));
        assert!(Pick::Group(Group::Snapshot).has(Metric::RestoreFirstExec));
        assert!(!Pick::Metric(Metric::Kill).has(Metric::KillAll));
        let refused = "forks".parse::<Pick>().unwrap_err();
        assert!(refused.contains("fork, memory") && refused.contains("fork_pause"), "{refused}");
    }

    #[test]
    fn each_metric_is_documented_with_its_unit() {
        let page = include_str!("../../../../docs/BENCHMARKS.md");
        for metric in Metric::value_variants() {
            let row = page.lines().find(|line| line.starts_with(&format!("| `{}` |", metric.name())));
            let row = row.unwrap_or_else(|| panic!("docs/BENCHMARKS.md misses {}", metric.name()));
            assert!(row.contains(&format!("| {} |", metric.unit())), "{row}");
            assert!(!metric.about().is_empty(), "{metric:?}");
        }
    }
}
