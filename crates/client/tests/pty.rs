//! The terminal protocol, against a web socket server in this process.

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use keiki_client::{Client, Error, PtyEvent, PtyRequest, SandboxId};
use std::sync::{Arc, Mutex};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tokio_tungstenite::tungstenite::{
    Message,
    handshake::server::{Request, Response},
};

async fn listen() -> (TcpListener, Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let client = Client::new(&url).unwrap().with_api_key("k1");
    (listener, client)
}

#[tokio::test]
async fn bytes_sizes_and_the_exit_code_travel() {
    let (listener, client) = listen().await;
    let asked = Arc::new(Mutex::new(String::new()));
    let seen = Arc::clone(&asked);
    let server = tokio::spawn(async move {
        let (tcp, _) = listener.accept().await.unwrap();
        #[allow(clippy::result_large_err)] // The callback's type is the library's.
        let look = |request: &Request, response: Response| {
            let key = request.headers()["authorization"].to_str().unwrap().to_owned();
            *seen.lock().unwrap() = format!("{} {key}", request.uri());
            Ok(response)
        };
        let mut socket = tokio_tungstenite::accept_hdr_async(tcp, look).await.unwrap();
        // Echoes keys; tells a size back as text on the screen; ends after it.
        while let Some(Ok(message)) = socket.next().await {
            match message {
                Message::Binary(bytes) => socket.send(Message::Binary(bytes)).await.unwrap(),
                Message::Text(text) => {
                    socket.send(Message::Binary(Bytes::from(text.to_string()))).await.unwrap();
                    socket.send(Message::Text(r#"{"exit_code":9}"#.into())).await.unwrap();
                }
                _ => {}
            }
        }
    });
    let id = SandboxId::new();
    let request = PtyRequest { cols: 80, rows: 24, cmd: Some("a b&c".into()), ..Default::default() };
    let mut pty = client.pty(id, &request).await.unwrap();
    let keys = Bytes::from_static(&[0xff, 0, 13]);
    pty.input.send(keys.clone()).await.unwrap();
    assert_eq!(pty.output.next().await.unwrap(), PtyEvent::Output(keys));
    pty.input.resize(100, 40).await.unwrap();
    let told = Bytes::from_static(br#"{"resize":{"cols":100,"rows":40}}"#);
    assert_eq!(pty.output.next().await.unwrap(), PtyEvent::Output(told));
    assert_eq!(pty.output.next().await.unwrap(), PtyEvent::Exit(9));
    drop(pty);
    server.await.unwrap();
    let expected = format!("/v1/sandboxes/{id}/exec/pty?cols=80&rows=24&cmd=a+b%26c Bearer k1");
    assert_eq!(*asked.lock().unwrap(), expected);
}

#[tokio::test]
async fn a_refusal_carries_the_sentence() {
    let (listener, client) = listen().await;
    tokio::spawn(async move {
        let (mut tcp, _) = listener.accept().await.unwrap();
        let _ = tcp.read(&mut [0; 4096]).await.unwrap();
        let body = r#"{"error":"no such sandbox"}"#;
        let answer = format!("HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        tcp.write_all(answer.as_bytes()).await.unwrap();
    });
    let refused = client.pty(SandboxId::new(), &PtyRequest::default()).await;
    match refused.map(drop) {
        Err(Error::Api { status: 404, message, .. }) => assert_eq!(message, "no such sandbox"),
        other => panic!("{other:?}"),
    }
}
