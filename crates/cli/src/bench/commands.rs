//! Commands in a running sandbox.

use super::{
    guest::{Holder, MIB},
    pick::Metric,
    run::{Bench, Samples, ms, true_command},
};
use crate::exit::Failure;
use serde_json::json;
use std::time::Instant;

/// Warm-up commands: an emulated processor has to translate the code once.
const WARM_EXECS: usize = 20;
/// Commands are short and vary, so take this many times more samples.
const EXECS: usize = 10;

impl Bench<'_> {
    pub(super) async fn commands(&self, guest: &str) -> Result<Samples, Failure> {
        let id = self.warm().await?;
        if guest == "dirtying" {
            Holder::start(self.client, id, MIB).await?.spin().await?;
        }
        let (mut samples, params) = (Samples::default(), json!({"guest": guest, "after": WARM_EXECS}));
        let n = self.size.n * EXECS;
        for at in 0..WARM_EXECS + n {
            if at % EXECS == 0 {
                self.say(&format!("exec, {guest} guest"), at, WARM_EXECS + n);
            }
            let start = Instant::now();
            self.client.exec(id, &true_command()).await?;
            if at >= WARM_EXECS {
                samples.add(Metric::ExecRoundtrip, &params, [ms(start)]);
            }
        }
        self.client.delete(id).await?;
        Ok(samples)
    }
}
