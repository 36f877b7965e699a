//! API keys: where a request carries one, and whether it may use the API.

use crate::{App, errors::Failure};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, header, request::Parts, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};
use keiki_api::{Error, Result};
use std::net::IpAddr;

/// A header that carries the key and nothing else.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Lets a request through that may use the API.
pub(super) async fn authorize(State(app): State<App>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match allowed(&app, &parts) {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(error) => Failure::from(error).into_response(),
    }
}

fn allowed(app: &App, parts: &Parts) -> Result<()> {
    app.api.authorize(key(parts).as_deref())?;
    // A node without keys trusts every program that reaches loopback. So do web pages in a browser on this machine; they
    // are told apart by headers that a browser always sends.
    if app.api.authorize(None).is_ok() && !local(&parts.headers) {
        return Err(Error::Forbidden(
            "this node has no API keys and answers only local programs: the Host must be localhost or an IP address, \
             and a browser page of another origin may not call it"
                .into(),
        ));
    }
    Ok(())
}

/// The key: `Authorization: Bearer`, then `X-API-Key`, then, for event streams and WebSockets, which a browser opens
/// without headers, `?access_token=`.
pub(super) fn key(parts: &Parts) -> Option<String> {
    let headers = &parts.headers;
    let bare = || {
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let streams = text(header::UPGRADE).is_some_and(|value| value.eq_ignore_ascii_case("websocket"))
            || text(header::ACCEPT).is_some_and(|value| value.contains("text/event-stream"));
        let query = parts.uri.query().filter(|_| streams)?;
        pairs(query)?.into_iter().find(|(name, _)| name == "access_token").map(|(_, key)| key)
    };
    let [bearer, plain] = [header::AUTHORIZATION, API_KEY].map(|name| header_key(headers, &name));
    bearer.or(plain).or_else(bare)
}

/// The key in one of the two headers.
pub(super) fn header_key(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    if *name == API_KEY {
        return Some(text.to_owned());
    }
    let (scheme, key) = text.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim().to_owned())
}

/// A query's names and values, decoded.
pub(super) fn pairs(query: &str) -> Option<Vec<(String, String)>> {
    let uri = format!("/?{query}").parse().ok()?;
    axum::extract::Query::try_from_uri(&uri).ok().map(|pairs| pairs.0)
}

/// Is this request addressed to this machine and not caused by a web page of another origin?
fn local(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or(""));
    let host = text(header::HOST);
    let here = host.is_none_or(|host| {
        host.parse::<Authority>().is_ok_and(|host| {
            let name = host.host().trim_start_matches('[').trim_end_matches(']');
            name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
        })
    });
    let own_page = text(header::ORIGIN)
        .is_none_or(|origin| origin.split_once("://").is_some_and(|(_, authority)| Some(authority) == host));
    let fetched_here = text(HeaderName::from_static("sec-fetch-site"))
        .is_none_or(|site| ["same-origin", "none"].contains(&site));
    here && own_page && fetched_here
}

#[cfg(test)]
mod tests {
    use super::{key, local};
    use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, request::Parts};

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(k, v)| (HeaderName::from_static(k), HeaderValue::from_static(v))).collect()
    }

    fn parts(uri: &str, pairs: &[(&'static str, &'static str)]) -> Parts {
        let mut parts = Request::builder().uri(uri).body(()).map(Request::into_parts).unwrap().0;
        parts.headers = headers(pairs);
        parts
    }

    #[test]
    fn keys_are_found_in_their_places() {
        let of = |uri: &str, pairs: &[_]| key(&parts(uri, pairs));
        assert_eq!(of("/", &[("authorization", "Bearer k")]).as_deref(), Some("k"));
        assert_eq!(of("/", &[("authorization", "bearer  k ")]).as_deref(), Some("k"));
        assert_eq!(of("/", &[("authorization", "Basic x"), ("x-api-key", "k")]).as_deref(), Some("k"));
        assert_eq!(of("/", &[("authorization", "Bearer a"), ("x-api-key", "b")]).as_deref(), Some("a"));
        assert_eq!(of("/?access_token=k", &[]), None);
        assert_eq!(of("/?a=b&access_token=k%2B+", &[("upgrade", "WebSocket")]).as_deref(), Some("k+ "));
        assert_eq!(of("/?access_token=k", &[("accept", "text/event-stream")]).as_deref(), Some("k"));
    }

    #[test]
    fn pages_from_elsewhere_are_not_local() {
        for pairs in [
            &[][..],
            &[("host", "127.0.0.1:7777")],
            &[("host", "[::1]:7777")],
            &[("host", "LOCALHOST:7777")],
            &[("host", "localhost:1"), ("origin", "http://localhost:1"), ("sec-fetch-site", "same-origin")],
        ] {
            assert!(local(&headers(pairs)), "{pairs:?}");
        }
        for pairs in [
            &[("host", "evil.example:7777")][..],
            &[("host", "localhost:1"), ("origin", "https://evil.example")],
            &[("host", "localhost:1"), ("origin", "null")],
            &[("host", "localhost:1"), ("sec-fetch-site", "cross-site")],
        ] {
            assert!(!local(&headers(pairs)), "{pairs:?}");
        }
    }
}
