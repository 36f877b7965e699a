//! What can be measured, and which of it is asked for.

use clap::ValueEnum;

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Metric {
    /// Create: request to vCPU running, measured by the node; page cache warm and cold
    RestoreStep,
    /// Create: the release gate, from running vCPUs to user work that goes on; page cache warm and cold
    Release,
    /// Each step of that, by its name: on the node, and `guest:` in the guest
    ReleaseStep,
    /// Create, then `true`: request to first event; page cache warm and cold
    CreateFirstExec,
    /// Of that, what the release gate takes; page cache warm and cold
    ReleaseShare,
    /// Delete: request to everything freed
    Kill,
    /// Create many at once: until the last answered `true`
    CreateAll,
    /// Delete many at once: until the last is freed
    KillAll,
    /// `true` in a running sandbox: request to answer; idle and dirtying guests
    ExecRoundtrip,
    /// Fork: vCPUs stood still; 64 MiB freshly dirtied; idle and dirtying guests
    ForkPause,
    /// Fork: user processes stood still; 64 MiB freshly dirtied; idle and dirtying guests
    ForkUserPause,
    /// Fork, then `true` in the child: request to first event; idle and dirtying guests
    ForkFirstExec,
    /// Fork of eight, until each child answered `true`
    #[value(name = "fork8_all")]
    Fork8All,
    /// Fork of 1, 10 and 32, until each child answered `true`; idle and dirtying guests
    ForkAll,
    /// The guest rewrites 64 MiB: undisturbed, right after a fork, and as the child of one
    ForkTax,
    /// Memory of a child that does nothing
    PssPerIdleChild,
    /// Memory of each of ten children, after it started and after it wrote
    PssPerChild,
    /// Of that, what no other has
    PrivatePerChild,
    /// Fork of ten off a guest that holds a loaded model, until each child answered
    ModelForkAll,
    /// Memory of that guest and its ten children together
    ModelPssSum,
    /// Snapshot: request to durable
    Snapshot,
    /// Restore of a snapshot, then `true`: request to first event; page cache warm and cold
    RestoreFirstExec,
    /// Boot of the template's kernel, measured once while it was baked, for comparison
    ColdBoot,
}

/// Metrics that are measured together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Group {
    /// Sandboxes come and go
    Create,
    /// Commands
    Exec,
    /// Forks
    Fork,
    /// Memory
    Memory,
    /// A loaded model and its forks
    Model,
    /// Snapshots and restores
    Snapshot,
    /// Boot
    Boot,
}

impl Metric {
    /// Its name in reports and arguments.
    pub fn name(self) -> String {
        name_of(&self)
    }

    /// What its numbers are.
    pub fn unit(self) -> &'static str {
        match self {
            Self::PssPerIdleChild | Self::PssPerChild | Self::PrivatePerChild | Self::ModelPssSum => "MiB",
            Self::ReleaseShare => "ratio",
            _ => "ms",
        }
    }

    /// What it belongs to.
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

    /// What it is, in a line.
    pub fn about(self) -> String {
        let help = self.to_possible_value().and_then(|value| value.get_help().map(ToString::to_string));
        help.unwrap_or_default()
    }
}

/// A metric or a group, as `--only` names it. `snapshot` is both: the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// One.
    Metric(Metric),
    /// All of a group.
    Group(Group),
}

impl Pick {
    /// Is this metric meant?
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
            let row = row.unwrap_or_else(|| panic!("docs/BENCHMARKS.md does not tell of {}", metric.name()));
            assert!(row.contains(&format!("| {} |", metric.unit())), "{row}");
            assert!(!metric.about().is_empty(), "{metric:?}");
        }
    }
}
