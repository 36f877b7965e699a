//! Events of sandboxes.

use crate::{
    error::{Error, Result},
    transport::Client,
};
use futures::{StreamExt, stream::BoxStream};
use keiki_types::{
    SandboxId,
    api::{Event, EventList},
};
use reqwest::{Method, RequestBuilder};

/// Most events in one answer.
const MOST: usize = 1000;

impl Client {
    /// Events of one sandbox or all, oldest first: those after number `since`, or the latest; at
    /// most `limit`.
    pub async fn events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
        limit: Option<usize>,
    ) -> Result<Vec<Event>> {
        let limit = limit.map(|limit| ("limit", limit.clamp(1, MOST) as u64));
        let request = self.events_request(of, since).query(&limit.into_iter().collect::<Vec<_>>());
        self.json::<EventList>(request).await.map(|list| list.items)
    }

    /// Past events without a limit, then new ones. Ends when the node stops or the sandbox is
    /// deleted.
    pub async fn follow_events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
    ) -> Result<BoxStream<'static, Result<Event>>> {
        let request = self.events_request(of, since).query(&[("follow", "true")]);
        let events = self.events_of(request).await?.map(|event| {
            let data = event?.data;
            serde_json::from_str(&data).map_err(|error| Error::Protocol(format!("event {data}: {error}")))
        });
        Ok(events.boxed())
    }

    fn events_request(&self, of: Option<SandboxId>, since: Option<u64>) -> RequestBuilder {
        let path = of.map_or_else(|| "/v1/events".into(), |id| format!("/v1/sandboxes/{id}/events"));
        let since: Vec<_> = since.map(|since| ("since", since)).into_iter().collect();
        self.request(Method::GET, &path).query(&since)
    }
}
