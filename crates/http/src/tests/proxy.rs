//! Previews, before a guest that serves HTTP.

use super::{
    answers::{Answer, ask, send},
    live::{Server, read_until},
};
use crate::fake::{FakeNode, first_sandbox};
use axum::{body::Body, extract::Request, http::StatusCode};
use futures::{SinkExt, StreamExt};
use serde_json::json;
use std::sync::Arc;
use tokio::io::AsyncReadExt;
use tokio_tungstenite::{client_async, tungstenite};

const KEY: &str = "the-key-of-the-node";
const PAGE: [(&str, &str); 2] = [("sec-fetch-mode", "navigate"), ("accept", "text/html")];

fn keyed() -> Arc<FakeNode> {
    Arc::new(FakeNode::with_key(Some(KEY.into())))
}

fn host() -> String {
    format!("80-{}.preview.test:7777", first_sandbox())
}

async fn get(node: &Arc<FakeNode>, host: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::builder().uri(path).header("host", host);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    send(node, request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn by_path_a_guest_is_asked_for_its_own_paths_and_never_gets_the_key() {
    let node = keyed();
    let path = format!("/v1/sandboxes/{}/proxy/80", first_sandbox());
    let uri = format!("{path}/a%2Fb?x=1&access_token={KEY}");
    for key in [("authorization", format!("Bearer {KEY}")), ("x-api-key", KEY.to_owned())] {
        let request =
            Request::builder().method("POST").uri(&uri).header("host", "node:1").header(key.0, &key.1);
        let answer = send(&node, request.body(Body::from(vec![b'x'; 100_000])).unwrap()).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert!(!answer.text().contains(KEY), "{}", answer.text());
        let seen = answer.json();
        assert_eq!(
            (&seen["method"], &seen["uri"], &seen["body"]),
            (&json!("POST"), &json!("/a%2Fb?x=1"), &json!(100_000))
        );
        assert_eq!(seen["headers"]["x-forwarded-prefix"], path);
        assert_eq!(seen["headers"]["host"], "localhost:80");
        assert_eq!(answer.headers["set-cookie"], format!("own=1; Path={path}/"));
        assert!(answer.headers["content-security-policy"].to_str().unwrap().starts_with("sandbox "));
    }
    assert_eq!(send(&node, Request::get(&uri).body(Body::empty()).unwrap()).await.status, 401);
    let get = |rest: &str| {
        let request = Request::get(format!("{path}{rest}")).header("x-api-key", KEY);
        send(&node, request.body(Body::empty()).unwrap())
    };
    let answer = get("?q").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["location"]),
        (308, &format!("{path}/?q").parse().unwrap())
    );
    assert_eq!(get("/").await.json()["uri"], "/");
    assert_eq!(get("/away").await.headers["location"], format!("{path}/login"));
    let answer = get("/missing").await;
    assert_eq!((answer.status.as_u16(), answer.text().as_str()), (404, "the guest's own words"));
}

#[tokio::test]
async fn what_cannot_be_reached_is_told_by_the_node() {
    let node = Arc::new(FakeNode::default());
    for (path, status, words) in [
        ("{id}/proxy/81/x", 502, "nothing listens on port 81"),
        ("{id}/proxy/13/x", 502, "without a complete answer"),
        ("{id}/proxy/7/x", 502, "does not speak HTTP/1.1"),
        ("{id}/proxy/0/x", 400, "1 to 65535"),
        ("{id}/proxy/x/x", 400, "1 to 65535"),
        ("x/proxy/80/x", 404, "no sandbox x"),
    ] {
        let answer = ask(&node, &format!("GET /v1/sandboxes/{path}"), "").await;
        assert_eq!(answer.status.as_u16(), status, "{path}: {}", answer.text());
        assert!(answer.error().contains(words), "{path}: {}", answer.error());
    }
}

#[tokio::test]
async fn a_link_lets_a_browser_in_to_one_port_and_nothing_else() {
    let node = keyed();
    let request = Request::post(format!("/v1/sandboxes/{}/previews", first_sandbox()))
        .header("x-api-key", KEY)
        .header("host", "node:7777")
        .body(Body::from(r#"{"port":80,"ttl_seconds":60}"#))
        .unwrap();
    let made = send(&node, request).await;
    assert_eq!(made.status, 201, "{}", made.text());
    let url = made.json()["url"].as_str().unwrap().to_owned();
    assert!(made.json()["expires_at"].is_string() && !url.contains(KEY));
    let rest = url.strip_prefix(&format!("http://{}/?keiki_pass=", host())).unwrap().to_owned();
    // A page: the pass becomes a cookie and leaves the address.
    let entered = get(&node, &host(), &format!("/?a=1&keiki_pass={rest}"), &PAGE).await;
    assert_eq!((entered.status.as_u16(), &entered.headers["location"]), (303, &"/?a=1".parse().unwrap()));
    let cookie = entered.headers["set-cookie"].to_str().unwrap();
    assert!(cookie.ends_with("; Path=/; HttpOnly; SameSite=Lax; Max-Age=59"), "{cookie}");
    let cookie = format!("keiki_preview=junk; own=2; {}", cookie.split(';').next().unwrap());
    let seen =
        get(&node, &host(), "/v1/sandboxes?x", &[("cookie", &cookie), ("authorization", "Basic guest")])
            .await
            .json();
    // Also paths of the API are the guest's here.
    assert_eq!(seen["uri"], "/v1/sandboxes?x");
    assert_eq!(
        (&seen["headers"]["cookie"], &seen["headers"]["authorization"]),
        (&json!("own=2"), &json!("Basic guest"))
    );
    assert_eq!(seen["headers"]["x-forwarded-host"], host());
    // Over TLS no other host of the domain can set the cookie, and one that may be such a host's does not count.
    let tls = [PAGE.as_slice(), &[("x-forwarded-proto", "https")]].concat();
    let entered = get(&node, &host(), &format!("/?keiki_pass={rest}"), &tls).await;
    let secure = entered.headers["set-cookie"].to_str().unwrap();
    assert!(secure.starts_with("__Host-keiki_preview=") && secure.ends_with("; Secure"), "{secure}");
    for (sent, status) in [(cookie.as_str(), 401), (secure.split(';').next().unwrap(), 200)] {
        let asked = [("cookie", sent), ("x-forwarded-proto", "https")];
        assert_eq!(get(&node, &host(), "/", &asked).await.status, status, "{sent}");
    }
    // A program may use the link as it is.
    assert_eq!(get(&node, &host(), &format!("/?keiki_pass={rest}"), &[]).await.json()["uri"], "/");
    // Another port, another sandbox, no pass, a page of elsewhere.
    let other = host().replacen("80-", "81-", 1);
    assert_eq!(get(&node, &other, "/", &[("cookie", &cookie)]).await.status, 401);
    let refused = get(&node, &host(), "/", &[]).await;
    assert_eq!(refused.status, 401);
    assert!(refused.error().contains("keiki open"));
    for foreign in [("origin", "https://evil.example"), ("sec-fetch-site", "same-site")] {
        assert_eq!(
            get(&node, &host(), "/", &[("cookie", &cookie), foreign]).await.status,
            403,
            "{foreign:?}"
        );
    }
    // The pass is no key of the API.
    let pass = format!("Bearer {rest}");
    assert_eq!(
        get(&node, "node:7777", "/v1/sandboxes", &[("authorization", &pass), ("cookie", &cookie)])
            .await
            .status,
        401
    );
    // A key is one of the preview, and stays here.
    let seen = get(&node, &host(), "/", &[("x-api-key", KEY), ("authorization", "Bearer guest")]).await;
    assert!(seen.text().contains("Bearer guest") && !seen.text().contains(KEY));
    let bearer = format!("Bearer {KEY}");
    assert!(!get(&node, &host(), "/", &[("authorization", &bearer)]).await.text().contains(KEY));
}

#[tokio::test]
async fn a_page_of_a_guest_cannot_act_on_a_node_without_keys() {
    let node = Arc::new(FakeNode::default());
    let by_host = format!("http://{}", host());
    for origin in ["null", &by_host] {
        let request = Request::delete(format!("/v1/sandboxes/{}", first_sandbox()))
            .header("host", "localhost:7777")
            .header("origin", origin);
        assert_eq!(send(&node, request.body(Body::empty()).unwrap()).await.status, 403, "{origin}");
    }
    // On its own host there is no API at all.
    let answer = get(&node, &host(), "/v1/version", &[("origin", &by_host)]).await;
    assert_eq!(answer.json()["uri"], "/v1/version");
}

#[tokio::test]
async fn bad_wishes_for_links_are_named() {
    let node = Arc::new(FakeNode::default());
    for (body, words) in [
        (r#"{"port":0}"#, "port must be from 1"),
        (r#"{"port":70000}"#, "port is invalid"),
        ("{}", "`port`"),
        (r#"{"port":80,"ttl_seconds":0}"#, "ttl_seconds must be from 1 to 604800, not 0"),
        (r#"{"port":80,"ttl_seconds":604801}"#, "ttl_seconds must be from 1 to 604800"),
    ] {
        let answer = ask(&node, "POST /v1/sandboxes/{id}/previews", body).await;
        assert_eq!(answer.status, 400);
        assert!(answer.error().contains(words), "{}", answer.error());
    }
    // Where no keys are asked for, a link needs no pass.
    let made = ask(&node, "POST /v1/sandboxes/{id}/previews", r#"{"port":80}"#).await.json();
    assert!(made["url"].as_str().unwrap().ends_with(".preview.test/") && made["expires_at"].is_null());
    assert_eq!(ask(&node, "GET /v1/sandboxes/{id}/ports", "").await.json()["items"][0]["process"], "echo");
}

#[tokio::test]
async fn streams_come_as_they_are_sent() {
    let server = Server::start().await;
    let mut stream = server.send("GET /v1/sandboxes/{id}/proxy/80/events", "").await;
    let text = read_until(&mut stream, "data: one\n\n").await;
    assert!(text.contains("content-type: text/event-stream"), "{text}");
    let counted = server.node.counters.text_after(String::new());
    let line = r#"keiki_http_requests_total{method="GET",route="/v1/sandboxes/{id}/proxy/{port}/{*path}",status="2xx"} 1"#;
    assert!(counted.lines().any(|other| other == line), "{counted}");
}

#[tokio::test]
async fn a_websocket_goes_through_by_path_and_by_host() {
    let server = Server::start().await;
    let by_path = format!("ws://{}/v1/sandboxes/{}/proxy/80/socket", server.address, first_sandbox());
    let by_host = format!("ws://{}/socket", host());
    for url in [by_path, by_host] {
        let mut request = tungstenite::client::IntoClientRequest::into_client_request(url.as_str()).unwrap();
        let origin = format!("http://{}", request.headers()["host"].to_str().unwrap());
        request.headers_mut().insert("origin", origin.parse().unwrap());
        let (mut socket, _) = client_async(request, server.connect().await).await.unwrap();
        // To the server inside it is its own page that asks.
        let first = socket.next().await.unwrap().unwrap();
        assert_eq!(first, tungstenite::Message::Text("http://localhost:80".into()));
        for size in [1, 100_000] {
            let message = tungstenite::Message::Binary(vec![7_u8; size].into());
            socket.send(message.clone()).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap(), message);
        }
        socket.close(None).await.unwrap();
        while let Some(Ok(_)) = socket.next().await {}
    }
    // No other protocol is smuggled through.
    let mut stream = server.connect().await;
    let head =
        format!("GET /x HTTP/1.1\r\nHost: {}\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n\r\n", host());
    tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 200") && !text.contains("h2c"), "{text}");
}
