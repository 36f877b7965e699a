//! Events and metrics.

use super::answers::{ask, node, send};
use crate::{App, fake::first_sandbox, router};
use axum::{body::Body, http::Request};
use futures::StreamExt;
use std::time::Duration;
use tower::ServiceExt;

#[tokio::test]
async fn events_are_listed_from_a_number_on() {
    let node = node();
    let numbers = |answer: serde_json::Value| -> Vec<u64> {
        let items = answer["items"].as_array().unwrap();
        items.iter().map(|event| event["seq"].as_u64().unwrap()).collect()
    };
    let all = ask(&node, "GET /v1/sandboxes/{id}/events", "").await.json();
    assert_eq!(numbers(all.clone()), [1, 2, 3, 4, 5]);
    assert_eq!(all["items"][0]["kind"], "paused");
    assert_eq!(numbers(ask(&node, "GET /v1/events?since=3", "").await.json()), [4, 5]);
    assert_eq!(numbers(ask(&node, "GET /v1/events?limit=2", "").await.json()), [1, 2]);
    for (line, status, words) in [
        ("GET /v1/events?limit=0", 400, "limit must be from 1 to 1000, not 0"),
        ("GET /v1/events?limit=1001", 400, "limit must be from 1 to 1000, not 1001"),
        ("GET /v1/events?since=-1", 400, "since"),
        ("GET /v1/events?follow=perhaps", 400, "follow"),
        ("GET /v1/sandboxes/x/events", 404, "no sandbox x"),
        ("GET /v1/sandboxes/0190b7a0-0000-7000-8000-000000000002/events?follow=1", 404, "no sandbox 0190"),
    ] {
        let answer = ask(&node, line, "").await;
        assert_eq!(answer.status.as_u16(), status, "{line}");
        assert!(answer.error().contains(words), "{line}: {}", answer.error());
    }
}

/// What of a stream without end comes at once.
async fn beginning(uri: &str, last: Option<&str>) -> String {
    let mut request = Request::builder().uri(uri);
    if let Some(last) = last {
        request = request.header("Last-Event-ID", last);
    }
    let request = request.body(Body::empty()).unwrap();
    let response = router(App::new(node())).oneshot(request).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    let mut text = Vec::new();
    while let Ok(Some(Ok(chunk))) = tokio::time::timeout(Duration::from_millis(200), body.next()).await {
        text.extend_from_slice(&chunk);
    }
    String::from_utf8(text).unwrap()
}

#[tokio::test]
async fn a_stream_of_events_goes_on_where_its_client_lost_it() {
    let uri = format!("/v1/sandboxes/{}/events?follow=true&since=3", first_sandbox());
    let text = beginning(&uri, None).await;
    assert!(text.starts_with("id: 4\nevent: paused\ndata: {\"seq\":4,"), "{text}");
    assert_eq!(text.matches("\n\n").count(), 2, "{text}");
    assert!(beginning(&uri, Some("4")).await.starts_with("id: 5\n"));
    assert!(beginning(&uri, Some("x")).await.contains("Last-Event-ID must be the number"));
}

#[tokio::test]
async fn requests_are_counted_by_route_and_status() {
    let node = node();
    for _ in 0..3 {
        ask(&node, "GET /v1/sandboxes/{id}", "").await;
        ask(&node, "GET /v1/sandboxes/unknown", "").await;
        ask(&node, "GET /some/where/else", "").await;
    }
    let request = Request::builder().method("BREW").uri("/v1/sandboxes").body(Body::empty()).unwrap();
    send(&node, request).await;
    let answer = ask(&node, "GET /metrics", "").await;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(answer.headers["content-type"], kind);
    let text = answer.text();
    for line in [
        r#"keiki_http_requests_total{method="GET",route="/v1/sandboxes/{id}",status="200"} 3"#,
        r#"keiki_http_requests_total{method="GET",route="/v1/sandboxes/{id}",status="404"} 3"#,
        r#"keiki_http_requests_total{method="GET",route="-",status="404"} 3"#,
        r#"keiki_http_requests_total{method="other",route="/v1/sandboxes",status="405"} 1"#,
        r#"keiki_http_request_seconds_count{route="/v1/sandboxes/{id}"} 6"#,
    ] {
        assert!(text.lines().any(|other| other == line), "{line}\n{text}");
    }
    assert!(!text.contains(&first_sandbox().to_string()), "no ids");
}
