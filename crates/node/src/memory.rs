//! Host memory of all machines, cached for a moment.

use crate::sandbox::Live;
use futures::{StreamExt, stream};
use keiki_types::api::MemoryUse;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// Reading the memory use of every monitor takes time: it happens at most this often.
const MEASURE_EVERY: Duration = Duration::from_secs(5);
/// Monitors measured at the same time.
const AT_ONCE: usize = 4;

/// Memory of all machines, as it was a moment ago.
#[derive(Default)]
pub(crate) struct Measured(Mutex<Option<(Instant, MemoryUse)>>);

impl Measured {
    pub async fn of(&self, machines: Vec<Arc<Live>>) -> MemoryUse {
        let mut last = self.0.lock().await;
        if let Some((at, sum)) = *last
            && at.elapsed() < MEASURE_EVERY
        {
            return sum;
        }
        let measured = stream::iter(machines)
            // A machine that has just ended no longer has any memory.
            .map(|live| async move { live.machine.memory().await.unwrap_or_default() })
            .buffer_unordered(AT_ONCE);
        let sum = measured.fold(MemoryUse::default(), |sum, one| async move { add(sum, one) }).await;
        *last = Some((Instant::now(), sum));
        sum
    }
}

fn add(a: MemoryUse, b: MemoryUse) -> MemoryUse {
    MemoryUse {
        guest_bytes: a.guest_bytes.saturating_add(b.guest_bytes),
        rss_bytes: a.rss_bytes.saturating_add(b.rss_bytes),
        pss_bytes: a.pss_bytes.saturating_add(b.pss_bytes),
        private_bytes: a.private_bytes.saturating_add(b.private_bytes),
        shared_bytes: a.shared_bytes.saturating_add(b.shared_bytes),
    }
}
