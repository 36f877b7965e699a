//! Stale snapshots: a snapshot receives no updates. Which ones are reported, and which are not
//! restored.

use crate::{
    config::Config,
    daemon::Inner,
    error::{Error, Result},
    records::SnapshotRecord,
};
use keiki_types::api::{self, Stale};
use std::time::Duration;

impl Inner {
    /// As the API shows it.
    pub(crate) fn snapshot_view(&self, snapshot: &SnapshotRecord) -> api::Snapshot {
        let is_rebuilt = self.is_rebuilt(&snapshot.template, &snapshot.template_version);
        let template = is_rebuilt.then_some(Stale::TemplateRebuilt);
        snapshot.view(template.into_iter().chain(by_age(&self.config, snapshot.age())).collect())
    }

    /// 409 for a snapshot that this node no longer restores.
    pub(crate) fn refuse_old(&self, snapshot: &SnapshotRecord) -> Result<()> {
        let (age, Some(limit)) = (snapshot.age(), self.config.snapshot_refuse_age) else { return Ok(()) };
        if age <= limit {
            return Ok(());
        }
        Err(Error::Conflict(format!(
            "snapshot {} is {} old, and this node does not restore snapshots older than {}: take a new one from \
             a sandbox of template {} (`keiki template rebake {}` bakes it again), or raise \
             snapshot_refuse_age",
            snapshot.id,
            span(age),
            span(limit),
            snapshot.template,
            snapshot.template
        )))
    }
}

fn by_age(config: &Config, age: Duration) -> impl Iterator<Item = Stale> {
    let over = |limit: Option<Duration>| limit.is_some_and(|limit| age > limit);
    let old = over(config.snapshot_max_age).then_some(Stale::Old);
    old.into_iter().chain(over(config.snapshot_refuse_age).then_some(Stale::Refused))
}

/// `3 days`, `7 hours`, `90 seconds`: whole ones of the largest unit of which there are two.
fn span(age: Duration) -> String {
    let seconds = age.as_secs();
    let units = [("days", 86_400), ("hours", 3600), ("minutes", 60)];
    let unit = units.into_iter().find(|(_, size)| seconds >= 2 * size);
    let (name, size) = unit.unwrap_or(("seconds", 1));
    format!("{} {name}", seconds / size)
}

#[cfg(test)]
mod tests {
    use super::span;
    use std::time::Duration;

    #[test]
    fn ages_are_told_in_a_unit_that_fits() {
        for (seconds, said) in [
            (0, "0 seconds"),
            (119, "119 seconds"),
            (120, "2 minutes"),
            (86_400, "24 hours"),
            (200_000, "2 days"),
        ] {
            assert_eq!(span(Duration::from_secs(seconds)), said);
        }
    }
}
