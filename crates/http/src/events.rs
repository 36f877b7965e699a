//! What happened to sandboxes: as a list, or as it happens.

use super::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath},
    responses::{Any, Asked, Named},
    sse,
};
use axum::{
    Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{StreamExt, stream};
use keiki_api::{Error, Result};
use keiki_types::{
    SandboxId,
    api::{Event, EventList},
};
use serde::Deserialize;
use utoipa::IntoParams;

/// What a client that lost its stream sends: the number of the last event it saw.
const LAST_EVENT_ID: &str = "last-event-id";
/// Events listed where nothing is asked for.
const LISTED: usize = 200;
/// Most of one answer.
const MOST: usize = keiki_api::MAX_EVENTS;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// Only events after this number. Without it: the last ones.
    since: Option<u64>,
    /// At most so many, 1 to 1000; default 200. Not with `follow`.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Go on with what comes, as server-sent events whose id is the event's number. `Last-Event-ID` beats `since`.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    follow: bool,
}

/// What happened to a sandbox, oldest first; also to one that is gone, as long as its events are kept.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/events", tag = "events", operation_id = "sandbox_events",
    params(("id" = String, Path, description = "The sandbox"), EventsQuery),
    responses((status = 200, description = "Its events", content(
            (EventList = "application/json"), (sse::ServerSentEvent = "text/event-stream"))),
        Any, Asked, Named))]
pub(super) async fn of_sandbox(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    answer(app, Some(id), query, &headers).await
}

/// What happened to all sandboxes of the node, oldest first.
#[utoipa::path(get, path = "/v1/events", tag = "events", operation_id = "events", params(EventsQuery),
    responses((status = 200, description = "The events", content(
            (EventList = "application/json"), (sse::ServerSentEvent = "text/event-stream"))),
        Any, Asked))]
pub(super) async fn of_all(
    State(app): State<App>,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    answer(app, None, query, &headers).await
}

async fn answer(
    app: App,
    of: Option<SandboxId>,
    query: EventsQuery,
    headers: &HeaderMap,
) -> Answer<Response> {
    let limit = query.limit.unwrap_or(LISTED);
    if !(1..=MOST).contains(&limit) {
        return Err(Error::Invalid(format!("limit is {limit}; it must be 1 to {MOST}")).into());
    }
    if !query.follow {
        let items = app.api.events(of, query.since, Some(limit)).await?;
        return Ok(Json(EventList { items }).into_response());
    }
    let since = last_seen(headers)?.or(query.since);
    let events = app.api.follow_events(of, since).await?;
    let frames = stream::unfold(events, |mut events| async move {
        match tokio::time::timeout(sse::PING_EVERY, events.next()).await {
            Ok(event) => event.map(|event| (frame(&event), events)),
            Err(_) => Some((sse::PING, events)),
        }
    });
    Ok(sse::response(frames.take_until(Box::pin(app.closing.clone().cancelled_owned()))))
}

fn last_seen(headers: &HeaderMap) -> Result<Option<u64>> {
    let Some(value) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    number
        .map(Some)
        .ok_or_else(|| Error::Invalid("Last-Event-ID is not the number of an event of this node".into()))
}

fn frame(event: &Event) -> Bytes {
    format!("id: {}\n{}", event.seq, sse::event(event.kind.as_str(), event)).into()
}
