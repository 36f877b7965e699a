//! Around every request: its id, its log line, its count.

use super::{App, errors, proxy};
use crate::metrics::Metrics;
use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode},
    middleware::Next,
    response::Response,
};
use futures::FutureExt;
use std::{panic::AssertUnwindSafe, time::Instant};
use tracing::Instrument;
use uuid::Uuid;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Status logged for a request whose client disconnected before the answer.
const CLIENT_LEFT: u16 = 499;

/// Gives the request its id, puts every failure into the envelope, and logs one line.
pub(super) async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let path = request.uri().path().to_owned();
    let mut line = Line {
        id: id.clone(),
        method: request.method().clone(),
        route: request.extensions().get::<MatchedPath>().map_or("-".into(), |path| path.as_str().to_owned()),
        started: Instant::now(),
        metrics: app.metrics.clone(),
        status: CLIENT_LEFT,
        error: None,
        is_guests: false,
    };
    let span = tracing::info_span!("request", id = id);
    let answered = AssertUnwindSafe(next.run(request)).catch_unwind().instrument(span).await;
    // The panic itself is reported by the panic hook.
    let response = answered.unwrap_or_else(|_| {
        errors::answer(StatusCode::INTERNAL_SERVER_ERROR, "the node failed on this request".into())
    });
    if response.extensions().get::<proxy::ByHost>().is_some() {
        line.route = proxy::BY_HOST.into();
    }
    line.is_guests = response.extensions().get::<proxy::FromGuest>().is_some();
    let mut response =
        if line.is_guests { response } else { errors::enveloped(response, &line.method, &path).await };
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    line.status = response.status().as_u16();
    line.error = response.extensions().get::<errors::Sentence>().map(|sentence| sentence.0.clone());
    response
}

/// The log line of one request; written when it is dropped, so even if the client disconnects
/// first.
struct Line {
    id: String,
    method: Method,
    route: String,
    started: Instant,
    metrics: Metrics,
    status: u16,
    error: Option<String>,
    is_guests: bool,
}

impl Drop for Line {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        let ms = took.as_secs_f64() * 1e3;
        self.metrics.request(self.method.as_str(), &self.route, self.status, self.is_guests, took);
        tracing::info!(
            id = self.id,
            method = self.method.as_str(),
            route = self.route,
            status = self.status,
            ms,
            error = self.error,
            "request"
        );
    }
}

/// The caller's request id if it is fit for a log, otherwise a new one.
fn request_id(headers: &HeaderMap) -> String {
    headers
        .get(REQUEST_ID)
        .map(HeaderValue::as_bytes)
        .filter(|id| (1..=200).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic))
        .and_then(|id| std::str::from_utf8(id).ok())
        .map_or_else(|| Uuid::new_v4().to_string(), ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::request_id;
    use axum::http::{HeaderMap, HeaderValue};
    use uuid::Uuid;

    #[test]
    fn a_fit_request_id_is_kept_and_any_other_replaced() {
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-request-id", HeaderValue::from_bytes(value.as_bytes()).unwrap());
            request_id(&headers)
        };
        for fit in ["a", "trace-1/~!", &"x".repeat(200)] {
            assert_eq!(of(fit), fit);
        }
        for unfit in ["", "a b", "é", "tab\there", &"x".repeat(201)] {
            assert!(Uuid::parse_str(&of(unfit)).is_ok(), "{unfit}");
        }
        assert!(Uuid::parse_str(&request_id(&HeaderMap::new())).is_ok());
    }
}
