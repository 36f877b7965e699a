//! What WebSockets have in common: their limits, failures, and finding out that the client is gone.

use crate::{errors, sse};
use axum::{
    extract::{
        WebSocketUpgrade,
        ws::{Message, WebSocket},
    },
    response::Response,
};
use keiki_api::Error;
use std::time::Duration;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use tracing::Instrument;

/// Largest message of a client.
const LARGEST: usize = 1 << 20;
/// Interval of pings, even while data flows: a client that only receives shows by its answers that it is alive.
pub(super) const PING_EVERY: Duration = Duration::from_secs(20);
/// A client that sent nothing for this long, not even an answer to a ping, is gone.
pub(super) const DEAD_AFTER: Duration = Duration::from_secs(90);

/// Answers with a WebSocket, which `serve` serves.
pub(super) fn upgraded<F: Future<Output = ()> + Send + 'static>(
    upgrade: WebSocketUpgrade,
    serve: impl FnOnce(WebSocket) -> F + Send + 'static,
) -> Response {
    let span = tracing::Span::current();
    let upgrade = upgrade.max_message_size(LARGEST).max_frame_size(LARGEST);
    upgrade.on_upgrade(move |socket| serve(socket).instrument(span))
}

/// The text frame `{"error":"…"}`.
pub(super) fn failure(error: &Error) -> Message {
    Message::Text(sse::ascii_json(&errors::body(error)).into())
}

/// When to send a ping.
pub(super) fn pings() -> Interval {
    let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings
}
