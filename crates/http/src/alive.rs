//! How a WebSocket's other side is known to be there, whichever side has something to say.

use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

/// A ping is sent so often, also while data flows: a client that only receives shows by its answers that it is there.
pub(super) const PING_EVERY: Duration = Duration::from_secs(20);
/// A client that has sent nothing for so long, not even an answer to a ping, is gone.
pub(super) const DEAD_AFTER: Duration = Duration::from_secs(90);

/// When to send one.
pub(super) fn pings() -> Interval {
    let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings
}
