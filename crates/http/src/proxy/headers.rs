//! The headers that each side of a preview sees.
//!
//! The guest sees `Host: localhost:PORT`, which development servers accept, and its outside name in `X-Forwarded-*`. Links
//! to itself in its answers are rewritten to lead through the preview.

use super::pass::{Credentials, is_pass};
use crate::key::API_KEY;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri, header, uri::Authority};
use keiki_api::Target;
use std::net::IpAddr;

/// Headers of one connection, not of the message (RFC 9110, 7.6.1), and headers for the node only.
const OF_CONNECTION: [&str; 10] = [
    "connection",
    "expect",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
/// Headers with which a guest could affect the API's origin.
const OF_ORIGIN: [&str; 6] = [
    "alt-svc",
    "clear-site-data",
    "public-key-pins",
    "service-worker-allowed",
    "strict-transport-security",
    "www-authenticate",
];
/// Gives a page an opaque origin.
const SANDBOX: &str = "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts";

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// The guest's address as the client knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outside {
    /// `http`, or `https` if a proxy in front of the node says so.
    pub scheme: &'static str,
    /// Host, with its port.
    pub host: String,
    /// Path before the guest's own path; empty by host.
    pub prefix: String,
}

impl Outside {
    pub(crate) fn of(headers: &HeaderMap, prefix: String) -> Self {
        let text =
            |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let first = |name| text(name).split(',').next().unwrap_or_default().trim().to_owned();
        let scheme = if first(FORWARDED_PROTO).eq_ignore_ascii_case("https") { "https" } else { "http" };
        let forwarded = first(FORWARDED_HOST);
        let host =
            if forwarded.parse::<Authority>().is_ok() { forwarded } else { text(header::HOST).to_owned() };
        Self { scheme, host, prefix }
    }
}

/// Does this request open a WebSocket? Other upgrades are not passed on: their content is unknown.
pub(super) fn asks_for_websocket(headers: &HeaderMap) -> bool {
    let has = |name: HeaderName, word: &str| {
        let values = headers.get_all(name);
        let mut words =
            values.iter().filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(','));
        words.any(|other| other.trim().eq_ignore_ascii_case(word))
    };
    has(header::CONNECTION, "upgrade") && has(header::UPGRADE, "websocket")
}

/// A request's headers as the guest sees them.
pub(super) fn to_guest(
    headers: &mut HeaderMap,
    target: Target,
    outside: &Outside,
    peer: Option<IpAddr>,
    credentials: Credentials,
) {
    let websocket = asks_for_websocket(headers);
    strip(headers, &OF_CONNECTION);
    headers.remove(API_KEY);
    if credentials != Credentials::Pass {
        headers.remove(header::AUTHORIZATION);
    }
    filter_cookies(headers);
    if websocket {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    }
    let inside = format!("localhost:{}", target.port);
    // The page's own origin becomes the guest's own: servers compare it with the host.
    let own = format!("{}://{}", outside.scheme, outside.host);
    let is_own = headers.get(header::ORIGIN).is_some_and(|origin| origin.as_bytes() == own.as_bytes());
    if is_own {
        set(headers, header::ORIGIN, &format!("http://{inside}"));
    }
    set(headers, header::HOST, &inside);
    set(headers, FORWARDED_HOST, &outside.host);
    set(headers, FORWARDED_PROTO, outside.scheme);
    if outside.prefix.is_empty() {
        headers.remove(FORWARDED_PREFIX);
    } else {
        set(headers, FORWARDED_PREFIX, &outside.prefix);
    }
    if let Some(peer) = peer {
        let before = headers.get(FORWARDED_FOR).and_then(|value| value.to_str().ok());
        let all = before.map_or_else(|| peer.to_string(), |before| format!("{before}, {peer}"));
        set(headers, FORWARDED_FOR, &all);
    }
}

/// An answer's headers as the client sees them.
pub(super) fn to_client(headers: &mut HeaderMap, target: Target, outside: &Outside, upgraded: bool) {
    strip(headers, &OF_CONNECTION);
    if upgraded {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    }
    if !outside.prefix.is_empty() {
        for name in OF_ORIGIN {
            headers.remove(name);
        }
        // In addition to the guest's own policy: a browser obeys both.
        headers.append(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(SANDBOX));
    }
    let cookies: Vec<HeaderValue> =
        headers.get_all(header::SET_COOKIE).iter().filter_map(|c| cookie(c, outside)).collect();
    headers.remove(header::SET_COOKIE);
    for cookie in cookies {
        headers.append(header::SET_COOKIE, cookie);
    }
    let place = headers.get(header::LOCATION).and_then(|value| value.to_str().ok());
    if let Some(place) = place.and_then(|place| location(place, target, outside)) {
        set(headers, header::LOCATION, &place);
    }
}

fn set(headers: &mut HeaderMap, name: HeaderName, text: &str) {
    match HeaderValue::from_str(text) {
        Ok(value) => drop(headers.insert(name, value)),
        // Sent by the client, and not a valid header value.
        Err(_) => drop(headers.remove(name)),
    }
}

fn strip(headers: &mut HeaderMap, names: &[&str]) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in names {
        headers.remove(*name);
    }
}

/// The guest gets its own cookies, not the pass.
fn filter_cookies(headers: &mut HeaderMap) {
    let kept: Vec<String> = headers
        .get_all(header::COOKIE)
        .iter()
        // A value that is not text could hide the pass.
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(';'))
        .filter(|pair| !pair.trim().is_empty() && !is_pass(pair))
        .map(|pair| pair.trim().to_owned())
        .collect();
    headers.remove(header::COOKIE);
    if !kept.is_empty() {
        set(headers, header::COOKIE, &kept.join("; "));
    }
}

/// A guest's cookie, limited to its preview: this host only, and by path below its own. None: the guest may not set it.
fn cookie(value: &HeaderValue, outside: &Outside) -> Option<HeaderValue> {
    let text = value.to_str().ok()?;
    let mut parts = text.split(';');
    let pair = parts.next()?;
    if is_pass(pair) {
        return None;
    }
    let (mut kept, mut path) = (vec![pair.trim().to_owned()], "/".to_owned());
    for part in parts {
        let (name, value) = part.split_once('=').map_or((part, ""), |(name, value)| (name, value));
        match name.trim().to_ascii_lowercase().as_str() {
            "domain" => {}
            "path" if value.trim().starts_with('/') => path = value.trim().to_owned(),
            "path" => {}
            _ => kept.push(part.trim().to_owned()),
        }
    }
    kept.push(format!("Path={}{path}", outside.prefix));
    HeaderValue::from_str(&kept.join("; ")).ok()
}

/// The outside address of a redirection back to this guest; None for any other.
fn location(place: &str, target: Target, outside: &Outside) -> Option<String> {
    if place.starts_with('/') && !place.starts_with("//") {
        return Some(format!("{}{place}", outside.prefix));
    }
    let uri: Uri = place.parse().ok()?;
    let authority = uri.authority()?;
    let is_inside = authority.port_u16() == Some(target.port)
        && ["localhost", "127.0.0.1", "[::1]"].iter().any(|host| authority.host().eq_ignore_ascii_case(host));
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    is_inside.then(|| format!("{}{path}", outside.prefix))
}

#[cfg(test)]
mod tests {
    use super::{Outside, asks_for_websocket, location, to_client, to_guest};
    use crate::proxy::pass::Credentials;
    use axum::http::{HeaderMap, HeaderName, HeaderValue};
    use keiki_api::Target;

    fn target() -> Target {
        Target { id: "0190b7a0-0000-7000-8000-000000000001".parse().unwrap(), port: 8000 }
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    fn outside(prefix: &str) -> Outside {
        Outside { scheme: "http", host: "node:7777".into(), prefix: prefix.into() }
    }

    fn given(pairs: &[(&'static str, &'static str)], credentials: Credentials) -> HeaderMap {
        let mut all = headers(pairs);
        to_guest(&mut all, target(), &outside("/p"), Some([192, 0, 2, 1].into()), credentials);
        all
    }

    #[test]
    fn a_guest_never_gets_what_opens_the_node() {
        let secret = [
            ("authorization", "Bearer secret"),
            ("x-api-key", "secret"),
            ("proxy-authorization", "secret"),
            ("cookie", "a=1; keiki_preview=secret; b=2;keiki_preview=secret; __Host-keiki_preview=secret"),
        ];
        for credentials in [Credentials::ByPath, Credentials::Key] {
            let all = given(&secret, credentials);
            assert!(!format!("{all:?}").contains("secret"), "{all:?}");
            assert_eq!(all["cookie"], "a=1; b=2");
        }
        let all = given(&[("authorization", "Basic own"), ("x-api-key", "secret")], Credentials::Pass);
        assert_eq!(all["authorization"], "Basic own");
        assert!(!all.contains_key("x-api-key"));
    }

    #[test]
    fn headers_of_a_connection_stay_with_it() {
        let all = given(
            &[
                ("connection", "keep-alive, X-Mine"),
                ("x-mine", "1"),
                ("te", "trailers"),
                ("upgrade", "h2c"),
                ("x-other", "2"),
            ],
            Credentials::Pass,
        );
        for gone in ["connection", "x-mine", "te", "upgrade"] {
            assert!(!all.contains_key(gone), "{gone}");
        }
        assert_eq!(all["x-other"], "2");
        let socket =
            [("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket"), ("sec-websocket-key", "k")];
        assert!(asks_for_websocket(&headers(&socket)));
        let all = given(&socket, Credentials::Pass);
        assert_eq!(
            (&all["connection"], &all["upgrade"]),
            (&"upgrade".parse().unwrap(), &"websocket".parse().unwrap())
        );
        assert!(!asks_for_websocket(&headers(&[("connection", "upgrade"), ("upgrade", "h2c")])));
    }

    #[test]
    fn a_guest_is_told_how_it_is_called_outside() {
        let all = given(
            &[("host", "node:7777"), ("origin", "http://node:7777"), ("x-forwarded-for", "198.51.100.9")],
            Credentials::Pass,
        );
        assert_eq!(
            (&all["host"], &all["origin"]),
            (&"localhost:8000".parse().unwrap(), &"http://localhost:8000".parse().unwrap())
        );
        assert_eq!(all["x-forwarded-for"], "198.51.100.9, 192.0.2.1");
        assert_eq!(
            (&all["x-forwarded-host"], &all["x-forwarded-proto"]),
            (&"node:7777".parse().unwrap(), &"http".parse().unwrap())
        );
        assert_eq!(all["x-forwarded-prefix"], "/p");
        assert_eq!(
            given(&[("origin", "https://evil.example")], Credentials::Pass)["origin"],
            "https://evil.example"
        );
        let behind =
            headers(&[("host", "inner"), ("x-forwarded-host", "outer, x"), ("x-forwarded-proto", "https")]);
        assert_eq!(
            Outside::of(&behind, String::new()),
            Outside { scheme: "https", host: "outer".into(), prefix: String::new() }
        );
        let odd = headers(&[("host", "inner"), ("x-forwarded-host", "a b"), ("x-forwarded-proto", "gopher")]);
        assert_eq!(
            Outside::of(&odd, String::new()),
            Outside { scheme: "http", host: "inner".into(), prefix: String::new() }
        );
    }

    #[test]
    fn redirections_lead_through_the_preview() {
        for (place, by_path, by_host) in [
            ("/login?a=b", Some("/p/login?a=b"), Some("/login?a=b")),
            ("http://localhost:8000/x?y", Some("/p/x?y"), Some("/x?y")),
            ("http://127.0.0.1:8000", Some("/p/"), Some("/")),
            ("http://localhost:8001/x", None, None),
            ("https://example.com/x", None, None),
            ("//example.com/x", None, None),
            ("next", None, None),
        ] {
            assert_eq!(location(place, target(), &outside("/p")).as_deref(), by_path, "{place}");
            assert_eq!(location(place, target(), &outside("")).as_deref(), by_host, "{place}");
        }
    }

    #[test]
    fn an_answer_says_nothing_about_other_origins() {
        let said = [
            ("set-cookie", "a=1; Domain=node; Path=/x; HttpOnly"),
            ("content-security-policy", "default-src 'self'"),
            ("clear-site-data", "*"),
            ("www-authenticate", "Basic"),
            ("service-worker-allowed", "/"),
            ("keep-alive", "1"),
        ];
        let mut by_path = headers(&said);
        by_path.append("set-cookie", HeaderValue::from_static("keiki_preview=forged"));
        let mut by_host = by_path.clone();
        to_client(&mut by_path, target(), &outside("/p"), false);
        let cookies: Vec<_> = by_path.get_all("set-cookie").iter().collect();
        assert_eq!(cookies, ["a=1; HttpOnly; Path=/p/x"]);
        let policies: Vec<_> = by_path.get_all("content-security-policy").iter().collect();
        assert_eq!(policies.len(), 2);
        assert!(
            policies[1].to_str().unwrap().starts_with("sandbox ")
                && !policies[1].to_str().unwrap().contains("same-origin")
        );
        for gone in ["clear-site-data", "www-authenticate", "service-worker-allowed", "keep-alive"] {
            assert!(!by_path.contains_key(gone), "{gone}");
        }
        to_client(&mut by_host, target(), &outside(""), false);
        assert_eq!(by_host["set-cookie"], "a=1; HttpOnly; Path=/x");
        assert_eq!(by_host["content-security-policy"], "default-src 'self'");
        assert!(by_host.contains_key("www-authenticate"));
    }
}
