//! Which requests may open a preview by its host name.
//!
//! ```text
//!   a key in a header                      programs; the key stays here
//!   ?keiki_pass=… of a link                a page: becomes a cookie of this host and leaves the address
//!   that cookie                            a browser from then on
//!   none of them, at a node without keys   as everywhere at such a node
//! ```
//!
//! A browser sends a cookie no matter which page causes the request. So requests caused by a page of another origin are
//! refused, other previews included. Allowed are links, and pages of the same sandbox on another port, as `Origin` shows.

use super::{
    headers::Outside,
    pass::{Credentials, PASS, PASS_COOKIE, PASS_COOKIE_TLS, cookie_name},
};
use crate::{
    App, errors,
    key::{API_KEY, header_key, pairs},
};
use axum::{
    extract::Request,
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use keiki_api::{Error, Previews, Result, Target};
use std::time::Duration;

/// What to do with a request.
pub(super) enum Verdict {
    /// It may pass.
    Come(Credentials),
    /// It is answered here.
    Answer(Response),
}

/// Decides about a request to the host of a preview. 403 for a request caused by a page of another origin.
pub(super) fn by_host(app: &App, previews: &Previews, target: Target, request: &Request) -> Result<Verdict> {
    let (headers, uri) = (request.headers(), request.uri());
    let is_key = |name| {
        let key = header_key(headers, &name);
        !previews.is_open && key.is_some_and(|key| app.api.authorize(Some(&key)).is_ok())
    };
    if is_key(header::AUTHORIZATION) {
        return Ok(Verdict::Come(Credentials::Key));
    }
    if is_key(API_KEY) {
        // Then `Authorization` is the guest's.
        return Ok(Verdict::Come(Credentials::Pass));
    }
    if let Some(left) = pass_in(uri).and_then(|pass| previews.admits(target, &pass)) {
        let navigates = [Method::GET, Method::HEAD].contains(request.method()) && is_navigation(headers);
        return Ok(if navigates {
            Verdict::Answer(enter(headers, uri, left))
        } else {
            Verdict::Come(Credentials::Pass)
        });
    }
    if !is_asked_for_here(previews, target, request.method(), headers) {
        return Err(Error::Forbidden(
            "a page of another origin may link to a preview but not send requests to it".into(),
        ));
    }
    let has_pass = || cookies(headers).any(|pass| previews.admits(target, pass).is_some());
    if previews.is_open || has_pass() {
        return Ok(Verdict::Come(Credentials::Pass));
    }
    let how = format!(
        "this preview needs a link with a pass: get one with `keiki open {} {}` or POST /v1/sandboxes/{}/previews",
        target.id, target.port, target.id
    );
    Ok(Verdict::Answer(errors::answer(StatusCode::UNAUTHORIZED, how)))
}

fn pass_in(uri: &Uri) -> Option<String> {
    let found = pairs(uri.query()?)?;
    found.into_iter().find(|(name, _)| name == PASS).map(|(_, pass)| pass)
}

/// The name of the pass cookie over this scheme, and the end of the cookie.
fn pass_cookie(headers: &HeaderMap) -> (&'static str, &'static str) {
    match Outside::of(headers, String::new()).scheme {
        "https" => (PASS_COOKIE_TLS, "; Secure"),
        _ => (PASS_COOKIE, ""),
    }
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let (wanted, _) = pass_cookie(headers);
    let values = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    // Another host of the domain may have set a cookie of this name: one valid cookie is enough.
    values
        .flat_map(|text| text.split(';'))
        .filter(move |pair| cookie_name(pair) == wanted)
        .filter_map(|pair| pair.split_once('=').map(|(_, pass)| pass.trim()))
}

/// Turns the pass into a cookie and removes it from the address, so that neither the page nor its links see it.
fn enter(headers: &HeaderMap, uri: &Uri, left: Duration) -> Response {
    let query = without(uri.query().unwrap_or_default(), PASS);
    let mark = if query.is_empty() { "" } else { "?" };
    // Only one slash: two would name another host.
    let path = format!("/{}", uri.path().trim_start_matches('/'));
    let mut response = onward(StatusCode::SEE_OTHER, &format!("{path}{mark}{query}"));
    let pass = pass_in(uri).unwrap_or_default();
    let (name, end) = pass_cookie(headers);
    let cookie = format!("{name}={pass}; Path=/; HttpOnly; SameSite=Lax; Max-Age={}{end}", left.as_secs());
    let told = response.headers_mut();
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        told.insert(header::SET_COOKIE, cookie);
    }
    told.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    told.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// A query without a parameter, however its name is encoded.
pub(super) fn without(query: &str, name: &str) -> String {
    let is_it = |pair: &str| {
        let found = pairs(pair);
        found.is_none_or(|all| all.iter().any(|(other, _)| other == name))
    };
    query.split('&').filter(|pair| !is_it(pair)).collect::<Vec<_>>().join("&")
}

fn text<'a>(headers: &'a HeaderMap, name: &'static str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

fn is_navigation(headers: &HeaderMap) -> bool {
    match text(headers, "sec-fetch-mode") {
        Some(mode) => mode == "navigate",
        None => text(headers, "accept").is_some_and(|types| types.contains("text/html")),
    }
}

/// Was this request caused by a page of the same sandbox, by a person, or by a program?
fn is_asked_for_here(previews: &Previews, target: Target, method: &Method, headers: &HeaderMap) -> bool {
    if let Some(origin) = text(headers, "origin") {
        let host = origin.split_once("://").map_or("", |(_, authority)| authority);
        let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
        return previews.named(host).is_some_and(|other| other.id == target.id);
    }
    match text(headers, "sec-fetch-site") {
        None | Some("same-origin" | "none") => true,
        Some(_) => {
            [Method::GET, Method::HEAD].contains(method)
                && text(headers, "sec-fetch-mode") == Some("navigate")
        }
    }
}

/// A redirection.
pub(super) fn onward(status: StatusCode, to: &str) -> Response {
    (status, [(header::LOCATION, to)]).into_response()
}

#[cfg(test)]
mod tests {
    use super::{is_asked_for_here, without};
    use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
    use keiki_api::{Previews, Target};

    #[test]
    fn a_parameter_is_taken_out_however_it_is_spelled() {
        for (query, left) in [
            ("", ""),
            ("access_token=k", ""),
            ("a=1&access_token=k&b=%20&access_token=j", "a=1&b=%20"),
            ("%61ccess_token=k&c", "c"),
            ("xaccess_token=1", "xaccess_token=1"),
        ] {
            assert_eq!(without(query, "access_token"), left, "{query}");
        }
    }

    #[test]
    fn pages_of_elsewhere_may_only_lead_here() -> anyhow::Result<()> {
        let previews = Previews::new([1; 32], "localhost", false)?;
        let target = Target { id: "0190b7a0-0000-7000-8000-000000000001".parse()?, port: 80 };
        let asked = |method: Method, pairs: &[(&'static str, &'static str)]| {
            let headers: HeaderMap = pairs
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
                .collect();
            is_asked_for_here(&previews, target, &method, &headers)
        };
        const SAME: &str = "http://3000-0190b7a0-0000-7000-8000-000000000001.localhost:7777";
        const OTHER: &str = "http://80-0190b7a0-0000-7000-8000-000000000002.localhost:7777";
        assert!(asked(Method::POST, &[]));
        assert!(asked(Method::GET, &[("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")]));
        assert!(asked(Method::POST, &[("sec-fetch-site", "same-origin")]));
        assert!(asked(Method::POST, &[("origin", SAME), ("sec-fetch-site", "same-site")]));
        assert!(asked(Method::GET, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]));
        for origin in [OTHER, "null", "https://evil.example", "http://localhost:7777", ""] {
            assert!(!asked(Method::POST, &[("origin", origin)]), "{origin}");
        }
        assert!(!asked(Method::GET, &[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors")]));
        assert!(!asked(Method::POST, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]));
        Ok(())
    }
}
