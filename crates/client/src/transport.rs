//! Requests and answers.

use crate::{
    error::{Error, Result},
    retry::{self, Retry},
    sse,
};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use keiki_types::api::ErrorBody;
use reqwest::{Method, RequestBuilder, Response, header::RETRY_AFTER};
use serde::{Serialize, de::DeserializeOwned};
use std::{sync::Arc, time::Duration};

/// Connecting to a node takes milliseconds or never succeeds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// An error is a sentence, and perhaps the last lines of a console.
const MAX_ERROR_BODY: usize = 1 << 20;

type OnRetry = Arc<dyn Fn(&Retry) + Send + Sync>;

/// A client of one node. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    pub(crate) base: Arc<str>,
    pub(crate) api_key: Option<Arc<str>>,
    request_key: Option<Arc<str>>,
    retry_budget: Duration,
    on_retry: Option<OnRetry>,
}

impl Client {
    /// A client of the node at `url`, e.g. `http://127.0.0.1:7777`.
    ///
    /// # Errors
    /// If `url` is not an `http` URL.
    pub fn new(url: &str) -> Result<Self> {
        let wrong = |why: String| Error::Address { url: url.into(), why };
        let parsed = reqwest::Url::parse(url).map_err(|error| wrong(error.to_string()))?;
        if parsed.scheme() != "http" {
            return Err(wrong("it must start with http:// (use a proxy or tunnel for TLS)".into()));
        }
        let base = parsed.as_str().trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("keiki/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(Error::Transport)?;
        Ok(Self {
            http,
            base: base.into(),
            api_key: None,
            request_key: None,
            retry_budget: Duration::from_secs(60),
            on_retry: None,
        })
    }

    /// Sends this key with every request.
    #[must_use]
    pub fn with_api_key(mut self, key: &str) -> Self {
        self.api_key = Some(key.into());
        self
    }

    /// Sends this `Idempotency-Key`: a create, restore, fork or snapshot with one key is executed
    /// once, however often it is sent. For one request and its retries, use
    /// `client.clone().named(key)`.
    #[must_use]
    pub fn named(mut self, key: &str) -> Self {
        self.request_key = Some(key.into());
        self
    }

    /// How long to retry a create or fork that the node refuses for now; 60 s by default, zero
    /// never.
    #[must_use]
    pub fn with_retry_budget(mut self, budget: Duration) -> Self {
        self.retry_budget = budget;
        self
    }

    /// Calls `notify` before each retry.
    #[must_use]
    pub fn on_retry(mut self, notify: impl Fn(&Retry) + Send + Sync + 'static) -> Self {
        self.on_retry = Some(Arc::new(notify));
        self
    }

    /// Address of the node.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.base
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base));
        let request = match &self.request_key {
            Some(key) => request.header("idempotency-key", key.as_ref()),
            None => request,
        };
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Sends; any answer but 2xx is an error.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().await.map_err(|source| {
            if source.is_connect() {
                Error::Unreachable { url: self.base.to_string(), source }
            } else {
                Error::Transport(source)
            }
        })?;
        if response.status().is_success() { Ok(response) } else { Err(refusal(response).await) }
    }

    /// Sends, and returns the body as it arrives.
    pub(crate) async fn bytes(&self, request: RequestBuilder) -> Result<BoxStream<'static, Result<Bytes>>> {
        let response = self.send(request).await?;
        Ok(response.bytes_stream().map_err(Error::Transport).boxed())
    }

    /// Sends, and returns the server-sent events of the answer.
    pub(crate) async fn events_of(
        &self,
        request: RequestBuilder,
    ) -> Result<BoxStream<'static, Result<sse::Event>>> {
        self.bytes(request.header("accept", "text/event-stream")).await.map(sse::events)
    }

    pub(crate) async fn json<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        let response = self.send(request).await?;
        let body = response.bytes().await.map_err(Error::Transport)?;
        serde_json::from_slice(&body).map_err(|error| Error::Protocol(error.to_string()))
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(self.request(Method::GET, path)).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.json(self.request(Method::POST, path).json(body)).await
    }

    /// A POST without a body.
    pub(crate) async fn act<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(self.request(Method::POST, path)).await
    }

    pub(crate) async fn remove(&self, path: &str) -> Result<()> {
        self.send(self.request(Method::DELETE, path)).await.map(drop)
    }

    /// A POST that is retried while the node has no room.
    pub(crate) async fn post_patiently<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T> {
        let notify = self.on_retry.as_deref();
        retry::with_budget(self.retry_budget, notify, || self.post(path, body)).await
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is a secret.
        f.debug_struct("Client").field("url", &self.base).finish_non_exhaustive()
    }
}

async fn refusal(response: Response) -> Error {
    let status = response.status().as_u16();
    let retry_after = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.trim().parse::<f64>().ok())
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    refused(status, &bounded_body(response).await, retry_after)
}

/// What a refusal with this body says.
pub(crate) fn refused(status: u16, body: &[u8], retry_after: Option<Duration>) -> Error {
    let (message, console) = match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) if !body.error.is_empty() => (body.error, body.console),
        _ => (format!("the node answered {status} without a reason"), None),
    };
    Error::Api { status, message, console, retry_after }
}

async fn bounded_body(mut response: Response) -> Vec<u8> {
    let mut body = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_ERROR_BODY {
            break;
        }
    }
    body
}

#[cfg(test)]
mod tests {
    use super::Client;
    use crate::error::Error;

    #[test]
    fn addresses_are_checked_and_normalised() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(Client::new(url).unwrap().url(), "http://h:1");
        }
        for url in ["", "h:1", "https://h", "unix:///x"] {
            assert!(matches!(Client::new(url), Err(Error::Address { .. })), "{url}");
        }
    }

    #[test]
    fn the_key_is_not_printed() {
        let client = Client::new("http://h").unwrap().with_api_key("hunter2");
        assert!(!format!("{client:?}").contains("hunter2"));
    }
}
