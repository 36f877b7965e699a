//! Events of sandboxes: as a list, or as they happen.

use crate::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath},
    responses::{AuthErrors, NotFound, QueryErrors},
    sse,
};
use axum::{
    Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use keiki_api::{Error, Result};
use keiki_types::{SandboxId, api::EventList};
use serde::Deserialize;
use utoipa::IntoParams;

/// Default of `limit`.
const LISTED: usize = 200;
/// Largest `limit`.
const MOST: usize = keiki_api::MAX_EVENTS;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// Only events after this number; default: the latest ones.
    since: Option<u64>,
    /// Maximum number of events, 1 to 1000; default 200. Ignored with `follow`.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Keep sending new events, as server-sent events whose id is the event's number. `Last-Event-ID` overrides `since`.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    follow: bool,
}

/// List or follow the events of a sandbox, oldest first; of a deleted one, too, while its events are kept.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/events", tag = "events", operation_id = "sandbox_events",
    params(("id" = String, Path, description = "The sandbox"), EventsQuery),
    responses((status = 200, description = "The events", content(
            (EventList = "application/json"), (sse::ServerSentEvent = "text/event-stream"))),
        AuthErrors, QueryErrors, NotFound))]
pub(super) async fn of_sandbox(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> Answer<Response> {
    answer(app, Some(id), query, &headers).await
}

/// List or follow the events of all sandboxes, oldest first.
#[utoipa::path(get, path = "/v1/events", tag = "events", operation_id = "events", params(EventsQuery),
    responses((status = 200, description = "The events", content(
            (EventList = "application/json"), (sse::ServerSentEvent = "text/event-stream"))),
        AuthErrors, QueryErrors))]
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
        return Err(Error::Invalid(format!("limit must be from 1 to {MOST}, not {limit}")).into());
    }
    if !query.follow {
        let items = app.api.events(of, query.since, Some(limit)).await?;
        return Ok(Json(EventList { items }).into_response());
    }
    let since = last_seen(headers)?.or(query.since);
    let events = app.api.follow_events(of, since).await?;
    let events = events.map(|event| sse::numbered(Some(event.seq.to_string()), event.kind.as_str(), &event));
    Ok(sse::response(events.take_until(app.closing.cancelled_owned())))
}

fn last_seen(headers: &HeaderMap) -> Result<Option<u64>> {
    let Some(value) = headers.get(sse::LAST_EVENT_ID) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    number.map(Some).ok_or_else(|| Error::Invalid("Last-Event-ID must be the number of an event".into()))
}
