//! Creating and deleting sandboxes.

use super::{
    pick::Metric,
    run::{Bench, REST, Samples, first_event, ms},
};
use crate::exit::Failure;
use futures::future::try_join_all;
use keiki_client::{TemplateName, api::Timings};
use serde_json::{Value, json};
use std::time::Instant;

/// The steps of the release gate.
const GATE: [&str; 3] = ["connect", "individualize", "thaw_user"];

/// The steps of the release gate, the guest's own among them.
fn of_gate(timings: &Timings) -> impl Iterator<Item = (&str, f64)> {
    let steps = timings.steps.iter().map(|step| (step.name.as_str(), step.ms));
    steps.filter(|(name, _)| GATE.contains(name) || name.starts_with("guest:"))
}

impl Bench<'_> {
    pub(super) async fn creates(&self, params: Value) -> Result<Samples, Failure> {
        let mut samples = Samples::default();
        for at in 0..self.size.n {
            self.say("create", at, self.size.n);
            self.rest(&params).await?;
            let start = Instant::now();
            let sandbox = self.client.create(&self.request()).await?;
            first_event(self.client, sandbox.id).await?;
            let took = ms(start);
            samples.add(Metric::CreateFirstExec, &params, [took]);
            if let Some(timings) = &sandbox.timings {
                samples.add(Metric::RestoreStep, &params, timings.thaw_ms);
                samples.add(Metric::Release, &params, timings.release_ms);
                samples.add(Metric::ReleaseShare, &params, timings.release_ms.map(|ms| ms / took));
                for (step, ms) in of_gate(timings) {
                    let mut params = params.clone();
                    params["step"] = step.into();
                    samples.add(Metric::ReleaseStep, &params, [ms]);
                }
            }
            let start = Instant::now();
            self.client.delete(sandbox.id).await?;
            samples.add(Metric::Kill, &params, [ms(start)]);
        }
        Ok(samples)
    }

    pub(super) async fn creates_at_once(&self, many: usize) -> Result<Samples, Failure> {
        let (mut samples, params) = (Samples::default(), json!({"sandboxes": many}));
        let n = self.size.samples_of(many);
        for at in 0..n {
            self.say(&format!("create {many} at once"), at, n);
            tokio::time::sleep(REST).await;
            let start = Instant::now();
            let ids = try_join_all((0..many).map(|_| self.warm())).await?;
            samples.add(Metric::CreateAll, &params, [ms(start)]);
            let start = Instant::now();
            try_join_all(ids.into_iter().map(|id| self.client.delete(id))).await?;
            samples.add(Metric::KillAll, &params, [ms(start)]);
        }
        Ok(samples)
    }

    /// Measured when the template was built; measuring it here would mean a build.
    pub(super) async fn cold_boot(&self) -> Result<Samples, Failure> {
        let mut samples = Samples::default();
        let template = self.template.as_deref().unwrap_or("base");
        let name: TemplateName = template.parse().map_err(|error| Failure::Usage(format!("{error}")))?;
        let boot = self.client.cold_boot_ms(&name).await?;
        if boot.is_none() {
            let why = format!("the node does not report the boot time of template {template}");
            self.leave_out("cold_boot", why, false);
        }
        samples.add(Metric::ColdBoot, &json!({"template": template}), boot);
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::of_gate;
    use keiki_client::api::{Step, Timings};

    #[test]
    fn the_gate_is_on_the_node_and_in_the_guest() {
        let steps = [("thaw", 8.0), ("connect", 16.0), ("guest:entropy", 64.0), ("record", 32.0)];
        let steps = steps.map(|(name, ms)| Step { name: name.into(), ms }).into();
        let timings = Timings { steps, ..Timings::default() };
        assert_eq!(of_gate(&timings).collect::<Vec<_>>(), [("connect", 16.0), ("guest:entropy", 64.0)]);
    }
}
