//! Previews: a server in a guest, seen through the node.

use crate::{World, patience, sandbox::Sandbox, within};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use keiki_types::{Status, api::CreatePreview};
use serde_json::Value;
use std::{sync::Arc, time::Duration};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    client_async,
    tungstenite::{Message, client::IntoClientRequest},
};

/// Mirrors requests and counts them, sends events on demand, and echoes a WebSocket's messages.
const SERVER: &str = r#"
import base64, hashlib, json, os, struct, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
count = 0
class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *args): pass
    def do_GET(self):
        if self.path == '/events': return self.events()
        if self.path == '/socket': return self.socket()
        self.mirror(b'')
    def do_POST(self):
        self.mirror(self.rfile.read(int(self.headers['content-length'])))
    def mirror(self, body):
        global count
        count += 1
        headers = {name.lower(): value for name, value in self.headers.items()}
        said = json.dumps({'method': self.command, 'path': self.path, 'headers': headers, 'count': count,
            'body': hashlib.sha256(body).hexdigest()}).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def events(self):
        self.send_response(200)
        self.send_header('Content-Type', 'text/event-stream')
        self.send_header('Connection', 'close')
        self.end_headers()
        for name in ['one', 'two']:
            while name == 'two' and not os.path.exists('/tmp/go'): time.sleep(0.02)
            self.wfile.write(f'data: {name}\n\n'.encode())
            self.wfile.flush()
        time.sleep(3600)
    def socket(self):
        key = self.headers['Sec-WebSocket-Key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11'
        self.send_response(101)
        self.send_header('Upgrade', 'websocket')
        self.send_header('Connection', 'Upgrade')
        self.send_header('Sec-WebSocket-Accept', base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8: return
            size = head[1] & 127
            if size == 126: size = struct.unpack('>H', self.rfile.read(2))[0]
            elif size == 127: size = struct.unpack('>Q', self.rfile.read(8))[0]
            mask, data = self.rfile.read(4), self.rfile.read(size)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
            length = bytes([size]) if size < 126 else b'\x7e' + struct.pack('>H', size)
            self.wfile.write(bytes([head[0]]) + length + data)
            self.wfile.flush()
ThreadingHTTPServer(('127.0.0.1', 8000), Handler).serve_forever()
"#;

struct Served {
    sandbox: Sandbox,
    http: reqwest::Client,
}

impl Served {
    async fn start(world: &World) -> Result<Self> {
        let sandbox = Sandbox::create(&world.node.client).await?;
        sandbox.client.write_bytes(sandbox.id, "/tmp/server.py", None, Bytes::from(SERVER)).await?;
        sandbox.background("python3 /tmp/server.py").await?;
        for _ in 0..200 * patience() {
            if sandbox.client.ports(sandbox.id).await?.iter().any(|port| port.port == 8000) {
                return Ok(Self { sandbox, http: reqwest::Client::new() });
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("the server in the guest did not start")
    }

    fn by_path(&self, port: u16, rest: &str) -> String {
        format!("{}/v1/sandboxes/{}/proxy/{port}{rest}", self.sandbox.client.url(), self.sandbox.id)
    }

    async fn get(&self, rest: &str) -> Result<Value> {
        let answer =
            self.http.get(self.by_path(8000, rest)).header("authorization", "Bearer secret").send().await?;
        ensure!(answer.status() == 200, "{}", answer.status());
        Ok(answer.json().await?)
    }
}

pub async fn a_server_inside_is_reached_by_path(world: Arc<World>) -> Result<()> {
    let served = Served::start(&world).await?;
    let ports = served.sandbox.client.ports(served.sandbox.id).await?;
    let ours = ports.iter().find(|port| port.port == 8000).context("port 8000")?;
    ensure!(ours.address == "127.0.0.1" && ours.process.as_deref() == Some("python3"), "{ours:?}");
    let seen = served.get("/a%20b?c=d").await?;
    ensure!(seen["path"] == "/a%20b?c=d" && seen["headers"]["host"] == "localhost:8000", "{seen}");
    ensure!(!seen.to_string().contains("secret"), "the key reached the guest: {seen}");
    let body: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let sent = served.http.post(served.by_path(8000, "/upload")).body(body.clone()).send().await?;
    served.sandbox.client.write_bytes(served.sandbox.id, "/tmp/same", None, body).await?;
    let expected = served.sandbox.sh("sha256sum /tmp/same").await?;
    let seen: Value = sent.json().await?;
    ensure!(expected.starts_with(seen["body"].as_str().unwrap_or("-")), "3 MB arrived otherwise: {seen}");
    let refused = served.http.get(served.by_path(8001, "/")).send().await?;
    ensure!(refused.status() == 502, "{}", refused.status());
    let said: Value = refused.json().await?;
    ensure!(
        said["error"].as_str().is_some_and(|text| text.contains("nothing listens on port 8001")),
        "{said}"
    );
    Ok(())
}

pub async fn events_and_websockets_go_through(world: Arc<World>) -> Result<()> {
    let served = Served::start(&world).await?;
    let (client, id) = (&served.sandbox.client, served.sandbox.id);
    let mut events = served.http.get(served.by_path(8000, "/events")).send().await?.bytes_stream();
    let mut text = String::new();
    while !text.contains("one\n\n") {
        text += std::str::from_utf8(&events.next().await.context("it ended")??)?;
    }
    ensure!(!text.contains("two"), "{text}");
    served.sandbox.sh("touch /tmp/go").await?;
    while !text.contains("two\n\n") {
        text += std::str::from_utf8(&events.next().await.context("it ended")??)?;
    }
    // By host name: a link, and a WebSocket from its page.
    let preview = client.create_preview(id, &CreatePreview { port: 8000, ttl_seconds: None }).await?;
    let outside = format!("8000-{id}.localhost");
    ensure!(preview.url.starts_with(&format!("http://{outside}:")), "{preview:?}");
    let address = client.url().trim_start_matches("http://").to_owned();
    let port = address.rsplit(':').next().unwrap_or_default();
    let mut request = format!("ws://{outside}:{port}/socket").into_client_request()?;
    request.headers_mut().insert("origin", format!("http://{outside}:{port}").parse()?);
    let (mut socket, _) = client_async(request, TcpStream::connect(&address).await?).await?;
    for size in [0, 100, 60_000] {
        let message = Message::Binary(vec![7_u8; size].into());
        socket.send(message.clone()).await?;
        ensure!(socket.next().await.context("no echo")?? == message, "{size} bytes came back otherwise");
    }
    // Deleting the sandbox closes open streams.
    client.delete(id).await?;
    let ended = async {
        while let Some(Ok(_)) = events.next().await {}
        while let Some(Ok(_)) = socket.next().await {}
    };
    tokio::time::timeout(within(10), ended).await.context("a stream outlives its sandbox")
}

pub async fn a_request_wakes_and_copies_serve_for_themselves(world: Arc<World>) -> Result<()> {
    let served = Served::start(&world).await?;
    ensure!(served.get("/").await?["count"] == 1, "the first request");
    let child = Served { sandbox: served.sandbox.fork_one().await?, http: served.http.clone() };
    ensure!(child.get("/").await?["count"] == 2, "the child goes on from the fork");
    ensure!(child.get("/").await?["count"] == 3, "the child counts for itself");
    ensure!(served.get("/").await?["count"] == 2, "the parent has not heard of it");
    let (client, id) = (&served.sandbox.client, served.sandbox.id);
    client.hibernate(id).await?;
    ensure!(served.sandbox.view().await?.status == Status::Hibernated, "not hibernated");
    ensure!(served.get("/").await?["count"] == 3, "it woke as it was");
    ensure!(served.sandbox.view().await?.status == Status::Running, "not woken");
    // By host name, as a browser requests the link.
    let preview = client.create_preview(id, &CreatePreview { port: 8000, ttl_seconds: None }).await?;
    client.hibernate(id).await?;
    let node = client.url().trim_start_matches("http://").parse()?;
    let browser = reqwest::Client::builder().resolve(&format!("8000-{id}.localhost"), node).build()?;
    let answer = browser.get(&preview.url).send().await?;
    ensure!(answer.status() == 200, "{} by {}", answer.status(), preview.url);
    ensure!(answer.json::<Value>().await?["count"] == 4, "it woke otherwise");
    ensure!(served.sandbox.view().await?.status == Status::Running, "not woken by its host's name");
    Ok(())
}
