//! Requests and their answers, without a socket.

use crate::fake::{FakeNode, TRAPS, first_sandbox};
use crate::{App, openapi, router};
use axum::{
    body::Body,
    http::{HeaderMap, Request, StatusCode},
};
use serde_json::{Value, json};
use std::sync::{Arc, atomic::Ordering};
use tower::ServiceExt;

pub(super) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Answer {
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {}", self.text()))
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The sentence, where the answer is exactly the envelope.
    pub(super) fn error(&self) -> String {
        assert_eq!(self.headers["content-type"], "application/json", "{}", self.text());
        let body = self.json();
        assert_eq!(body.as_object().map(serde_json::Map::len), Some(1), "{body}");
        body["error"].as_str().unwrap().to_owned()
    }
}

pub(super) async fn send(node: &Arc<FakeNode>, request: Request<Body>) -> Answer {
    let response = router(App { metrics: node.counters.clone(), ..App::new(node.clone()) })
        .oneshot(request)
        .await
        .unwrap();
    let (parts, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec();
    Answer { status: parts.status, headers: parts.headers, body }
}

/// Sends `METHOD path`, `{id}` being the sandbox that there is.
pub(super) async fn ask(node: &Arc<FakeNode>, line: &str, body: &str) -> Answer {
    let (method, path) = line.split_once(' ').unwrap();
    let path = path.replace("{id}", &first_sandbox().to_string());
    send(node, Request::builder().method(method).uri(path).body(Body::from(body.to_owned())).unwrap()).await
}

pub(super) fn node() -> Arc<FakeNode> {
    Arc::new(FakeNode::default())
}

fn last_call(node: &FakeNode) -> String {
    node.calls.lock().unwrap().last().cloned().unwrap_or_default()
}

#[tokio::test]
async fn every_documented_operation_is_served_and_no_other() {
    let document = serde_json::to_value(openapi()).unwrap();
    let mut served = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in ["get", "post", "put", "patch", "delete"] {
            let path = path.replace("{name}", "base");
            let answer = ask(&node(), &format!("{} {path}", method.to_uppercase()), "").await;
            let documented = item.get(method).is_some();
            assert_eq!(answer.status != 405, documented, "{method} {path}: {}", answer.status);
            assert!(!answer.text().contains("no such route"), "{method} {path}");
            assert!(answer.headers.contains_key("x-request-id"), "{method} {path}");
            served += usize::from(documented);
        }
    }
    assert_eq!(served, 63);
}

#[tokio::test]
async fn refusals_have_one_envelope_whoever_made_them() {
    for (line, body, status, sentence) in [
        ("GET /", "", 404, "no such route: GET /"),
        ("GET /v1/nothing", "", 404, "no such route: GET /v1/nothing"),
        ("POST /v1/sandboxes/x/nothing", "", 404, "no such route"),
        ("GET /v1/sandboxes/x", "", 404, "no sandbox x"),
        ("GET /v1/sandboxes/%FF", "", 404, "no such route"),
        ("GET /v1/sandboxes/..%2Fx", "", 404, "no sandbox ../x"),
        ("DELETE /v1/sandboxes/0190b7a0-0000-7000-8000-000000000002", "", 404, "no sandbox 0190b7a0"),
        ("GET /v1/snapshots/x", "", 404, "no snapshot x"),
        ("GET /v1/templates/UP", "", 404, "no template UP"),
        ("GET /v1/templates/builds/x", "", 404, "no build x"),
        ("PUT /v1/sandboxes", "", 405, "/v1/sandboxes does not support PUT"),
        ("PUT /healthz", "", 405, "/healthz does not support PUT"),
        ("POST /v1/sandboxes", "{", 400, "not valid JSON"),
        ("POST /v1/sandboxes", r#"{"ttl_seconds":"x"}"#, 400, "ttl_seconds is invalid"),
        ("POST /v1/sandboxes", r#"{"template":"busy"}"#, 503, "base is being built"),
        ("POST /v1/sandboxes/{id}/snapshots", "", 507, "a snapshot needs"),
        ("POST /v1/sandboxes/{id}/fork", r#"{"count":65}"#, 400, "count must be from 1 to 64, not 65"),
        ("POST /v1/sandboxes/{id}/fork-tree", "", 400, "`count`"),
        ("POST /v1/sandboxes/{id}/fork-tree", r#"{"count":0}"#, 400, "count must be from 1 to 64, not 0"),
        ("POST /v1/sandboxes/{id}/exec", "{}", 400, "cmd (a shell line) or argv"),
        (
            "POST /v1/sandboxes/{id}/exec",
            r#"{"cmd":"late","timeout_seconds":5}"#,
            504,
            "command timeout after 5s",
        ),
        ("POST /v1/sandboxes/{id}/exec", r#"{"cmd":"lost"}"#, 500, "the sandbox ended while the command ran"),
        ("GET /v1/sandboxes/{id}/fs", "", 400, "`path`"),
        ("GET /v1/sandboxes/{id}/fs?path=", "", 400, "path is empty"),
        ("GET /v1/sandboxes/{id}/fs?path=%FF", "", 400, "not UTF-8"),
        ("GET /v1/sandboxes/{id}/fs?path=/none", "", 404, "no file /none"),
        ("GET /v1/sandboxes/{id}/fs/stat?path=/none", "", 404, "no file /none"),
        (
            "PUT /v1/sandboxes/{id}/fs?path=/x&mode=9",
            "",
            400,
            "mode must be octal permission bits such as 0755, not \"9\"",
        ),
        ("POST /v1/sandboxes/{id}/fs/rename", r#"{"path":"/x"}"#, 400, "from is required"),
        ("POST /v1/sandboxes/{id}/fs/chmod", r#"{"path":"/x","mode":"x"}"#, 400, "mode must be octal"),
        ("POST /v1/sandboxes/{id}/fs/mkdir", "", 400, "`path`"),
        ("GET /v1/sandboxes/{id}/logs?stream=x", "", 400, "stream"),
        ("GET /v1/sandboxes/{id}/exec/pty", "", 400, "upgrade"),
        ("GET /v1/sandboxes/{id}/tcp/0", "", 400, "the port must be from 1 to 65535, not 0"),
        ("GET /v1/sandboxes/{id}/tcp/80x", "", 400, "the port must be"),
        ("GET /v1/sandboxes/{id}/execs/none", "", 404, "no command"),
        ("GET /v1/sandboxes/{id}/execs/a%2Fb", "", 404, "no command a/b"),
        (
            "GET /v1/sandboxes/{id}/execs/x1/stream?tail=1&stdout_offset=1",
            "",
            400,
            "offsets or tail, not both",
        ),
        ("GET /v1/sandboxes/{id}/execs/x1/stream?stdout_offset=-1", "", 400, "stdout_offset"),
        ("POST /v1/sandboxes/{id}/execs/x1/signal", "", 400, "`signal`"),
        ("GET /v1/sandboxes?memory=perhaps", "", 400, "memory"),
    ] {
        let answer = ask(&node(), line, body).await;
        assert_eq!(answer.status.as_u16(), status, "{line} {body}: {}", answer.text());
        let error = answer.error();
        assert!(error.to_lowercase().contains(&sentence.to_lowercase()), "{line} {body}: {error}");
        assert_eq!(answer.headers["content-length"], answer.body.len().to_string(), "{line}");
        let allow =
            (status == 405).then_some(if line.contains("healthz") { "GET,HEAD" } else { "POST,GET,HEAD" });
        assert_eq!(answer.headers.get("allow").map(|allow| allow.to_str().unwrap()), allow, "{line}");
        assert_eq!(answer.headers.contains_key("retry-after"), status == 503, "{line}");
    }
}

#[tokio::test]
async fn a_panic_is_an_answer_too() {
    let answer = ask(&node(), "POST /v1/sandboxes", r#"{"template":"panic"}"#).await;
    assert_eq!((answer.status.as_u16(), answer.error().as_str()), (500, "the node failed on this request"));
}

#[tokio::test]
async fn a_key_is_asked_for_everywhere_but_at_healthz() {
    let node = Arc::new(FakeNode::with_key(Some("k".into())));
    let with = |name: &'static str, value: &'static str| {
        Request::builder().uri("/v1/sandboxes").header(name, value).body(Body::empty()).unwrap()
    };
    for refused in
        [with("x-api-key", "other"), with("authorization", "Bearer"), with("authorization", "Basic k")]
    {
        let answer = send(&node, refused).await;
        assert_eq!(answer.status, 401);
        assert!(answer.error().contains("API key"));
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    for accepted in [with("x-api-key", "k"), with("authorization", "Bearer k")] {
        assert_eq!(send(&node, accepted).await.status, 200);
    }
    assert_eq!(ask(&node, "GET /healthz", "").await.status, 200);
    for path in ["/v1/version", "/v1/openapi.json", "/v1/sandboxes/x", "/v1/sandboxes?access_token=k"] {
        assert_eq!(ask(&node, &format!("GET {path}"), "").await.status, 401, "{path}");
    }
}

#[tokio::test]
async fn a_node_without_keys_refuses_pages_from_elsewhere() {
    let from = |origin: &'static str| {
        let request = Request::builder().method("POST").uri("/v1/sandboxes").header("host", "localhost:7777");
        request.header("origin", origin).body(Body::empty()).unwrap()
    };
    assert_eq!(send(&node(), from("https://evil.example")).await.status, 403);
    assert_eq!(send(&node(), from("http://localhost:7777")).await.status, 201);
}

#[tokio::test]
async fn the_callers_request_id_comes_back() {
    let request =
        Request::builder().uri("/healthz").header("x-request-id", "trace-1").body(Body::empty()).unwrap();
    assert_eq!(send(&node(), request).await.headers["x-request-id"], "trace-1");
}

#[tokio::test]
async fn a_body_larger_than_its_cap_is_413() {
    let large = format!("{{\"template\":\"{}\"}}", "x".repeat(1 << 20));
    let answer = ask(&node(), "POST /v1/sandboxes", &large).await;
    assert_eq!((answer.status.as_u16(), answer.error().contains("1 MiB")), (413, true));
    // Standard input may be larger.
    let large = format!("{{\"cmd\":\"traps\",\"stdin\":\"{}\"}}", "x".repeat(3 << 20));
    assert_eq!(ask(&node(), "POST /v1/sandboxes/{id}/exec", &large).await.status, 200);
    let announced = Request::builder().method("POST").uri(format!("/v1/sandboxes/{}/exec", first_sandbox()));
    let announced =
        announced.header("content-length", (65_u64 << 20).to_string()).body(Body::empty()).unwrap();
    assert_eq!(send(&node(), announced).await.status, 413);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_trickles_is_408() {
    let trickle = Body::from_stream(futures::stream::unfold((), |()| async {
        tokio::time::sleep(std::time::Duration::from_secs(20)).await;
        Some((Ok::<_, std::io::Error>(" "), ()))
    }));
    let node = node();
    let answer = send(&node, Request::post("/v1/sandboxes").body(trickle).unwrap()).await;
    assert_eq!((answer.status.as_u16(), answer.error().contains("did not arrive within")), (408, true));
    assert!(node.calls.lock().unwrap().is_empty(), "something was begun");
}

#[tokio::test]
async fn lists_have_their_names() {
    let node = node();
    for (line, name) in [
        ("GET /v1/sandboxes?memory=true", "items"),
        ("GET /v1/snapshots", "snapshots"),
        ("GET /v1/snapshots?sandbox_id=nonsense", "snapshots"),
        ("GET /v1/templates", "items"),
        ("GET /v1/templates/builds", "items"),
        ("GET /v1/sandboxes/{id}/fs/dir", "entries"),
    ] {
        let answer = ask(&node, line, "").await;
        assert!(answer.json()[name].is_array(), "{line}: {}", answer.text());
    }
    assert_eq!(*node.calls.lock().unwrap(), ["list true", "snapshots None", "list_dir /"]);
}

#[tokio::test]
async fn a_fork_tree_labels_its_children() {
    let node = node();
    let body = json!({"count": 2, "metadata": {"explore_ttl": "600"}}).to_string();
    let answer = ask(&node, "POST /v1/sandboxes/{id}/fork-tree", &body).await;
    assert_eq!(answer.status, 201);
    let tree = answer.json();
    assert_eq!(tree["children"].as_array().map(Vec::len), Some(2));
    let labels = &tree["children"][0]["metadata"];
    assert_eq!(labels["fork_tree_id"], tree["tree_id"]);
    assert_eq!(labels["fork_parent_id"], first_sandbox().to_string());
    assert!(last_call(&node).contains("ttl_seconds: Some(600)"), "{}", last_call(&node));
    // Without labels of their own they have the parent's, and its TTL.
    let answer = ask(&node, "POST /v1/sandboxes/{id}/fork-tree", r#"{"count":1}"#).await;
    assert_eq!(answer.json()["children"][0]["metadata"]["of"], "parent");
    assert!(last_call(&node).contains("ttl_seconds: None"));
    let wrong = r#"{"count":1,"metadata":{"explore_ttl":"soon"}}"#;
    let answer = ask(&node, "POST /v1/sandboxes/{id}/fork-tree", wrong).await;
    assert!(answer.error().starts_with("metadata.explore_ttl"));
}

#[tokio::test]
async fn bodyless_posts_are_whole_requests() {
    for (line, status) in [
        ("POST /v1/sandboxes", 201),
        ("POST /v1/sandboxes/{id}/fork", 201),
        ("POST /v1/sandboxes/{id}/promote", 200),
        ("POST /v1/sandboxes/{id}/pause", 200),
        ("POST /v1/sandboxes/{id}/wake", 200),
        ("DELETE /v1/sandboxes/{id}", 204),
        ("PATCH /v1/sandboxes/{id}/lifecycle", 200),
    ] {
        let answer = ask(&node(), line, "").await;
        assert_eq!(answer.status.as_u16(), status, "{line}: {}", answer.text());
        assert!(status == 204 || answer.headers.contains_key("content-length"), "{line}");
    }
}

#[tokio::test]
async fn buffered_output_is_exact() {
    let node = node();
    let ran = |cmd: &str| json!({ "cmd": cmd }).to_string();
    let result = ask(&node, "POST /v1/sandboxes/{id}/exec", &ran("traps")).await.json();
    let expected =
        json!({"stdout": TRAPS, "stderr": "", "exit_code": 0, "duration_ms": 3, "truncated": false});
    assert_eq!(result, expected);
    let result = ask(&node, "POST /v1/sandboxes/{id}/exec", &ran("binary")).await.json();
    assert_eq!((&result["stdout"], &result["stdout_base64"]), (&json!("a\u{fffd}\u{fffd}"), &json!("Yf/D")));
    assert_eq!((&result["stderr"], &result["exit_code"]), (&json!("e"), &json!(3)));
    let result = ask(&node, "POST /v1/sandboxes/{id}/exec", &ran("big")).await.json();
    assert_eq!(result["stdout"].as_str().map(str::len), Some(16 << 20));
    assert_eq!(result["truncated"], true);
    let result = ask(&node, "POST /v1/sandboxes/{id}/exec", &ran("none")).await.json();
    assert_eq!((&result["stderr"], &result["exit_code"]), (&json!("none: not found\n"), &json!(127)));
    assert_eq!(node.sessions.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn streamed_output_is_events() {
    let run = |cmd: &'static str| async move {
        let body = json!({"cmd": cmd, "timeout_seconds": 5}).to_string();
        let answer = ask(&node(), "POST /v1/sandboxes/{id}/exec/stream", &body).await;
        assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
        assert!(!answer.headers.contains_key("content-length"));
        assert!(answer.body.is_ascii());
        answer.text()
    };
    let text = run("traps").await;
    let chunks = text.split("\n\n").filter_map(|frame| frame.strip_prefix("event: stdout\ndata: "));
    let chunks =
        chunks.map(|data| serde_json::from_str::<Value>(data).unwrap()["chunk"].as_str().unwrap().to_owned());
    assert_eq!(chunks.collect::<String>(), TRAPS);
    assert!(text.ends_with("\n\nevent: exit\ndata: {\"exit_code\":0,\"duration_ms\":3}\n\n"), "{text}");
    assert_eq!(
        run("binary").await,
        concat!(
            "event: stdout\ndata: {\"chunk\":\"a\\ufffd\",\"base64\":\"Yf8=\"}\n\n",
            "event: stderr\ndata: {\"chunk\":\"e\"}\n\n",
            "event: stdout\ndata: {\"chunk\":\"\\ufffd\",\"base64\":\"ww==\"}\n\n",
            "event: exit\ndata: {\"exit_code\":3,\"duration_ms\":3}\n\n"
        )
    );
    assert_eq!(run("late").await, "event: error\ndata: {\"error\":\"command timeout after 5s\"}\n\n");
    assert_eq!(
        run("lost").await,
        "event: stdout\ndata: {\"chunk\":\"half\"}\n\nevent: error\ndata: {\"error\":\"the sandbox ended while the command ran\"}\n\n"
    );
}

#[tokio::test]
async fn files_travel_exactly() {
    let node = node();
    let name = "/a b/\u{e9}\n+%";
    let query = "path=/a+b/%C3%A9%0A%2B%25";
    let data = (0..=255_u8).cycle().take(5000).collect::<Vec<_>>();
    let put = Request::builder()
        .method("PUT")
        .uri(format!("/v1/sandboxes/{}/fs?{query}&mode=0755", first_sandbox()));
    let answer = send(&node, put.body(Body::from(data.clone())).unwrap()).await;
    assert_eq!(answer.json(), json!({"path": name, "bytes": 5000}));
    assert_eq!(last_call(&node), format!("write {name} Some(493)"));
    let answer = ask(&node, &format!("GET /v1/sandboxes/{{id}}/fs?{query}"), "").await;
    assert_eq!(answer.body, data);
    assert_eq!(
        (&answer.headers["content-length"], &answer.headers["x-keiki-mode"]),
        (&"5000".parse().unwrap(), &"0640".parse().unwrap())
    );
    let answer = ask(&node, &format!("DELETE /v1/sandboxes/{{id}}/fs?{query}&recursive=1"), "").await;
    assert_eq!((answer.status.as_u16(), last_call(&node)), (204, format!("remove {name} true")));
    // An empty file has a length; one that only says it is empty has none.
    ask(&node, "PUT /v1/sandboxes/{id}/fs?path=/empty", "").await;
    assert_eq!(ask(&node, "GET /v1/sandboxes/{id}/fs?path=/empty", "").await.headers["content-length"], "0");
    ask(&node, "PUT /v1/sandboxes/{id}/fs?path=/proc/x", "1").await;
    let answer = ask(&node, "GET /v1/sandboxes/{id}/fs?path=/proc/x", "").await;
    assert_eq!((answer.text().as_str(), answer.headers.contains_key("content-length")), ("1", false));
}

#[tokio::test]
async fn an_upload_that_ends_early_is_no_file() {
    let node = node();
    let put = Request::builder().method("PUT").uri(format!("/v1/sandboxes/{}/fs?path=/x", first_sandbox()));
    let answer = send(&node, put.header("content-length", "10").body(Body::from("half")).unwrap()).await;
    assert_eq!((answer.status.as_u16(), answer.error().contains("ended early")), (400, true));
    assert!(node.files.lock().unwrap().is_empty());
}

#[tokio::test]
async fn logs_are_text_or_events() {
    let answer = ask(&node(), "GET /v1/sandboxes/{id}/logs", "").await;
    assert_eq!(answer.headers["content-type"], "text/plain; charset=utf-8");
    assert_eq!(answer.text(), "hello é\nworld\n");
    assert_eq!(ask(&node(), "GET /v1/sandboxes/{id}/logs?stream=stderr", "").await.text(), "");
    let answer = ask(&node(), "GET /v1/templates/builds/b/logs?follow=1", "").await;
    assert_eq!(answer.text(), "data: one\n\ndata: end.\n\ndata: end\n\n");
    // Without follow it does not wait for the end.
    let answer = ask(&node(), "GET /v1/templates/builds/slow/logs", "").await;
    assert_eq!(answer.text(), "data: one\n\ndata: end\n\n");
}

#[tokio::test]
async fn a_name_makes_a_request_one_of_its_kind() {
    let node = node();
    let named = async |line: &str, body: &str, key: &str, caller: &str| {
        let (method, path) = line.split_once(' ').unwrap();
        let path = path.replace("{id}", &first_sandbox().to_string());
        let request = Request::builder().method(method).uri(path).header("idempotency-key", key);
        let request = request.header("x-api-key", caller).body(Body::from(body.to_owned())).unwrap();
        let answer = send(&node, request).await;
        (answer.status.as_u16(), node.named.lock().unwrap().pop())
    };
    let fork = "POST /v1/sandboxes/{id}/fork";
    let (status, first) = named(fork, r#"{"count":2}"#, "k", "me").await;
    assert_eq!(status, 201);
    assert!(first.is_some());
    assert_eq!(named(fork, r#" {"count": 2, "later": 1}"#, "k", "me").await.1, first, "the same request");
    assert_ne!(named(fork, r#"{"count":3}"#, "k", "me").await.1, first, "another body");
    assert_ne!(named(fork, r#"{"count":2}"#, "l", "me").await.1, first, "another name");
    assert_ne!(named(fork, r#"{"count":2}"#, "k", "you").await.1, first, "another caller");
    let tree = "POST /v1/sandboxes/{id}/fork-tree";
    let (_, first) = named(tree, r#"{"count":2}"#, "k", "me").await;
    assert_eq!(named(tree, r#"{"count":2}"#, "k", "me").await.1, first, "a tree's own id is not asked for");
    assert!(named("POST /v1/sandboxes", "{}", "k", "me").await.1.is_some());
    assert!(named("POST /v1/sandboxes/{id}/snapshots", "", "k", "me").await.1.is_some());
    for wrong in ["", "a b", &"x".repeat(256)] {
        assert_eq!(named("POST /v1/sandboxes", "{}", wrong, "me").await, (400, None), "{wrong:?}");
    }
    ask(&node, fork, "").await;
    assert!(node.named.lock().unwrap().is_empty(), "no name was given");
}

#[tokio::test]
async fn a_command_is_read_again_from_where_a_stream_was_lost() {
    let node = node();
    let answer =
        ask(&node, "GET /v1/sandboxes/{id}/execs/x1/stream?stdout_offset=4&stderr_offset=2", "").await;
    assert_eq!(
        answer.text(),
        "id: 6-2\nevent: stdout\ndata: {\"chunk\":\"\\u00e9\",\"offset\":4}\n\n\
         event: exit\ndata: {\"exit_code\":0,\"duration_ms\":3}\n\n"
    );
    ask(&node, "POST /v1/sandboxes/{id}/execs/x1/stdin?eof=true", "12345").await;
    ask(&node, "POST /v1/sandboxes/{id}/execs/x1/signal", r#"{"signal":"TERM"}"#).await;
    let start = r#"{"cmd":"top","stdin_open":true,"pty":{"cols":80,"rows":24}}"#;
    assert_eq!(ask(&node, "POST /v1/sandboxes/{id}/execs", start).await.status, 201);
    let calls = node.calls.lock().unwrap();
    assert_eq!(
        *calls,
        [
            "attach x1 Offsets([4, 2])",
            "stdin x1 5 true",
            "signal x1 Name(\"TERM\")",
            "start Some(\"top\") true Some(PtySize { cols: 80, rows: 24 })",
        ]
    );
}

#[tokio::test]
async fn trees_are_archives_and_streams_of_changes() {
    let node = node();
    let answer = ask(&node, "GET /v1/sandboxes/{id}/archive?path=/a+b", "").await;
    assert_eq!(
        (answer.text().as_str(), answer.headers["content-type"].to_str().unwrap()),
        ("tar", "application/x-tar")
    );
    let put = "PUT /v1/sandboxes/{id}/archive?path=/x&owners=true&strip_top=1";
    assert_eq!(ask(&node, put, "12345").await.status, 200);
    let answer = ask(&node, "GET /v1/sandboxes/{id}/fs/watch?path=/&recursive=true", "").await;
    assert_eq!(
        answer.text(),
        "event: ready\ndata: {\"kind\":\"ready\",\"path\":\"/\\u00e9\",\"is_dir\":true}\n\n\
         event: error\ndata: {\"error\":\"it was deleted\"}\n\n"
    );
    for (line, named) in [
        ("GET /v1/sandboxes/{id}/archive", "`path`"),
        ("GET /v1/sandboxes/{id}/archive?path=", "path is empty"),
        ("PUT /v1/sandboxes/{id}/archive?path=/x&owners=perhaps", "owners"),
        ("GET /v1/sandboxes/{id}/fs/watch?path=/&recursive=perhaps", "recursive"),
    ] {
        let answer = ask(&node, line, "").await;
        assert_eq!(answer.status, 400, "{line}");
        assert!(answer.error().contains(named), "{line}: {}", answer.error());
    }
    let calls = node.calls.lock().unwrap();
    assert_eq!(
        *calls,
        ["pack /a b", "unpack /x Unpacking { owners: true, strip_top: true } 5", "watch / true"]
    );
}
