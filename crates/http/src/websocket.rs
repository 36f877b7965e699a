//! Finding out that the client of a WebSocket is gone.

use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

/// Interval of pings, even while data flows: a client that only receives shows by its answers that it is alive.
pub(super) const PING_EVERY: Duration = Duration::from_secs(20);
/// A client that sent nothing for this long, not even an answer to a ping, is gone.
pub(super) const DEAD_AFTER: Duration = Duration::from_secs(90);

/// When to send a ping.
pub(super) fn pings() -> Interval {
    let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings
}
