//! Over a real socket: what depends on connections.

use crate::fake::{FakeNode, first_sandbox};
use crate::{
    App,
    serve::{Limits, serve_app},
};
use futures::{SinkExt, StreamExt};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tokio_tungstenite::{client_async, tungstenite::Message};

/// More than any step here takes, less than a test runner waits.
const LONG: Duration = Duration::from_secs(20);

pub(super) struct Server {
    pub node: Arc<FakeNode>,
    pub address: std::net::SocketAddr,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Server {
    pub(super) async fn start() -> Self {
        Self::start_with(Limits::default()).await
    }

    async fn start_with(limits: Limits) -> Self {
        let node = Arc::new(FakeNode::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(serve_app(
            App { metrics: node.counters.clone(), ..App::new(node.clone()) },
            listener,
            stopped,
            limits,
        ));
        Self { node, address, stop, served }
    }

    pub(super) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends a request as text and gives the open connection.
    pub(super) async fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = self.connect().await;
        let head = head.replace("{id}", &first_sandbox().to_string());
        let request = format!(
            "{head} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    async fn sessions_become(&self, count: usize) {
        let become_so = async {
            while self.node.sessions.load(Ordering::SeqCst) != count {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, become_so).await.unwrap_or_else(|_| panic!("sessions did not become {count}"));
    }
}

pub(super) async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&read).contains(end) {
            if stream.read_buf(&mut read).await.unwrap() == 0 {
                break;
            }
        }
    };
    timeout(LONG, reading).await.unwrap_or_else(|_| panic!("{end:?} did not come"));
    String::from_utf8_lossy(&read).into_owned()
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_command() {
    let server = Server::start().await;
    for path in ["exec", "exec/stream"] {
        let stream = server.send(&format!("POST /v1/sandboxes/{{id}}/{path}"), r#"{"cmd":"cat"}"#).await;
        server.sessions_become(1).await;
        drop(stream);
        server.sessions_become(0).await;
    }
}

#[tokio::test]
async fn events_arrive_while_the_command_runs() {
    let server = Server::start().await;
    let mut stream = server.send("GET /v1/sandboxes/{id}/logs?follow=true", "").await;
    let text = read_until(&mut stream, "world").await;
    assert!(text.contains("transfer-encoding: chunked"), "{text}");
    assert!(text.contains("data: {\"line\":\"hello \\u00e9\"}\n\n"), "{text}");
}

#[tokio::test]
async fn a_terminal_is_a_websocket() {
    let server = Server::start().await;
    let url =
        format!("ws://{}/v1/sandboxes/{}/exec/pty?cols=100&rows=30&cmd=cat", server.address, first_sandbox());
    let (mut socket, _) = client_async(&url, server.connect().await).await.unwrap();
    assert_eq!(
        server.node.calls.lock().unwrap().last().map(String::as_str),
        Some("exec cat Some((100, 30))")
    );
    socket.send(Message::Binary(b"\xff\x00keys".as_slice().into())).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::Binary(b"\xff\x00keys".as_slice().into()));
    for (wish, seen) in [(r#"{"resize":{"cols":5,"rows":6}}"#, "size 5x6;"), (r#"{"signal":2}"#, "signal 2;")]
    {
        socket.send(Message::Text(wish.into())).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), Message::Binary(seen.into()));
    }
    socket.send(Message::Text("nonsense".into())).await.unwrap();
    socket.send(Message::Text(r#"{"eof":true}"#.into())).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::Text(r#"{"exit_code":7}"#.into()));
    assert!(matches!(socket.next().await, Some(Ok(Message::Close(_)))));
    server.sessions_become(0).await;
}

#[tokio::test]
async fn a_terminal_whose_client_leaves_ends() {
    let server = Server::start().await;
    let url = format!("ws://{}/v1/sandboxes/{}/exec/pty", server.address, first_sandbox());
    let (socket, _) = client_async(&url, server.connect().await).await.unwrap();
    server.sessions_become(1).await;
    drop(socket);
    server.sessions_become(0).await;
}

#[tokio::test]
async fn a_refused_terminal_is_an_http_answer() {
    let server = Server::start().await;
    for (path, status) in [("x/exec/pty", 404), ("{id}/exec/pty?cols=0", 400)] {
        let path = path.replace("{id}", &first_sandbox().to_string());
        let url = format!("ws://{}/v1/sandboxes/{path}", server.address);
        let refused = client_async(&url, server.connect().await).await.err().map(|error| error.to_string());
        assert!(refused.as_ref().is_some_and(|error| error.contains(&status.to_string())), "{refused:?}");
    }
    assert_eq!(server.node.sessions.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_refused_upload_is_read_so_that_its_client_sees_why() {
    let server = Server::start().await;
    let unknown = "PUT /v1/sandboxes/0190b7a0-0000-7000-8000-000000000002/fs?path=/x";
    let mut stream = timeout(LONG, server.send(unknown, &"x".repeat(8 << 20))).await.unwrap();
    let text = read_until(&mut stream, "no sandbox").await;
    assert!(text.starts_with("HTTP/1.1 404"), "{text}");
}

#[tokio::test]
async fn a_head_without_bound_is_refused() {
    let server = Server::start().await;
    let mut stream = server.connect().await;
    let head = format!("GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: {}\r\n\r\n", "x".repeat(200 << 10));
    // The rest of it may meet a closed connection.
    let _ = stream.write_all(head.as_bytes()).await;
    let mut answer = [0; 12];
    timeout(LONG, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 431");
}

#[tokio::test]
async fn what_is_refused_before_it_is_a_request_has_a_status_and_no_body() {
    let server = Server::start().await;
    let many = (0..150).map(|n| format!("x-{n}: 1\r\n")).collect::<String>();
    for (sent, status) in [
        ("GARBAGE\r\n\r\n".to_owned(), 400),
        (format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(70 << 10)), 414),
        (format!("GET /x HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(200 << 10)), 431),
        (format!("GET /healthz HTTP/1.1\r\n{many}\r\n"), 431),
    ] {
        let mut stream = server.connect().await;
        // After a request that was answered, too.
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        read_until(&mut stream, "ok\"}").await;
        let _ = stream.write_all(sent.as_bytes()).await;
        let text = read_until(&mut stream, "\r\n\r\n").await;
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
        assert!(text.contains("content-length: 0\r\n"), "{text}");
    }
}

#[tokio::test]
async fn one_connection_too_many_is_told_so_and_may_come_back() {
    let server = Server::start_with(Limits { connections: 2, ..Limits::default() }).await;
    let (first, _second) = (server.connect().await, server.connect().await);
    sleep(Duration::from_millis(100)).await;
    let mut third = server.send("GET /healthz", "").await;
    let text = read_until(&mut third, "try again\"}").await;
    assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("retry-after: 1\r\n"), "{text}");
    drop(first);
    let served = async {
        loop {
            let mut again = server.send("GET /healthz", "").await;
            if read_until(&mut again, "\"}").await.contains("200 OK") {
                return;
            }
        }
    };
    timeout(LONG, served).await.unwrap();
}

#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let server = Server::start_with(Limits { head: Duration::from_millis(200), ..Limits::default() }).await;
    for sent in ["", "GET /healthz HT", "GET /healthz HTTP/1.1\r\nHost: x\r\n"] {
        let mut stream = server.connect().await;
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        timeout(LONG, stream.read_to_end(&mut rest)).await.unwrap_or_else(|_| panic!("{sent:?}")).unwrap();
    }
    // Nor is one that comes a byte at a time: it must be there as a whole.
    let (mut stream, begun) = (server.connect().await, Instant::now());
    let trickle = async {
        for byte in b"GET /healthz HTTP/1.1\r\nx-long: ".iter().chain(std::iter::repeat(&b'x')) {
            stream.write_all(&[*byte]).await?;
            sleep(Duration::from_millis(20)).await;
        }
        std::io::Result::Ok(())
    };
    assert!(timeout(LONG, trickle).await.expect("it is read for ever").is_err());
    assert!(begun.elapsed() < Duration::from_secs(5), "after {:?}", begun.elapsed());
    // An answer that takes longer than a head may is not cut off.
    let mut stream = server.send("POST /v1/sandboxes/{id}/exec/stream", r#"{"cmd":"cat"}"#).await;
    let mut rest = Vec::new();
    assert!(timeout(Duration::from_millis(600), stream.read_to_end(&mut rest)).await.is_err());
}

#[tokio::test]
async fn one_connection_carries_many_requests() {
    let server = Server::start().await;
    let mut stream = server.connect().await;
    for (line, end) in [
        ("GET /v1/sandboxes HTTP/1.1", "]}"),
        ("GET /v1/sandboxes/x HTTP/1.1", "no sandbox x\"}"),
        ("POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 0", "qemu\"}"),
        ("PUT /healthz HTTP/1.1", "supports\"}"),
        ("GET /healthz HTTP/1.1", "ok\"}"),
    ] {
        stream.write_all(format!("{line}\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
        let text = read_until(&mut stream, end).await;
        assert!(text.contains("content-length: "), "{text}");
    }
}

#[tokio::test]
async fn stopping_is_bounded_and_ends_what_runs() {
    let server = Server::start_with(Limits { grace: Duration::from_millis(500), ..Limits::default() }).await;
    let mut log = server.send("GET /v1/sandboxes/{id}/logs?follow=true", "").await;
    read_until(&mut log, "world").await;
    let _command = server.send("POST /v1/sandboxes/{id}/exec", r#"{"cmd":"cat"}"#).await;
    server.sessions_become(1).await;
    let begun = Instant::now();
    server.stop.send(()).unwrap();
    // A log that is followed ends properly.
    read_until(&mut log, "0\r\n\r\n").await;
    timeout(LONG, server.served).await.unwrap().unwrap().unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(500), "the command had its grace");
    assert_eq!(server.node.sessions.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn each_direction_of_a_port_ends_for_itself() {
    let server = Server::start().await;
    let open = |port: u16| {
        let url = format!("ws://{}/v1/sandboxes/{}/tcp/{port}", server.address, first_sandbox());
        let stream = server.connect();
        async move { client_async(url, stream.await).await }
    };
    let refused = open(9).await.unwrap_err();
    let tokio_tungstenite::tungstenite::Error::Http(answer) = refused else { panic!("{refused}") };
    assert_eq!(answer.status(), 502);
    // It echoes: what comes back ends because what we sent did.
    let (mut socket, _) = open(7).await.unwrap();
    socket.send(Message::Binary(vec![1; 100_000].into())).await.unwrap();
    socket.send(Message::Text(r#"{"eof":true}"#.into())).await.unwrap();
    let (mut bytes, mut ended) = (0, false);
    while let Some(Ok(message)) = timeout(LONG, socket.next()).await.unwrap() {
        match message {
            Message::Binary(data) if !ended => bytes += data.len(),
            Message::Text(text) => ended = text.as_str() == r#"{"eof":true}"#,
            other => assert!(matches!(other, Message::Close(_)), "{other:?}"),
        }
    }
    assert_eq!((bytes, ended), (100_000, true));
    // It ends first, and still gets what we say then.
    let (mut socket, _) = open(13).await.unwrap();
    let words = [Message::Binary("now".into()), Message::Text(r#"{"eof":true}"#.into())];
    for word in words {
        assert_eq!(timeout(LONG, socket.next()).await.unwrap().unwrap().unwrap(), word);
    }
    socket.send(Message::Binary("later".into())).await.unwrap();
    socket.send(Message::Text(r#"{"eof":true}"#.into())).await.unwrap();
    let noted = async {
        while !server.node.calls.lock().unwrap().iter().any(|call| call == "port 13 got 5 true") {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, noted).await.expect("what came after its end was lost");
}
