//! Connections to ports inside.

use super::refused;
use crate::{World, sandbox::Sandbox, within};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::future::try_join_all;
use keiki_client::{Error, Tcp};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// A threaded server in the guest that runs this for each connection `c`.
async fn serve(sandbox: &Sandbox, address: &str, port: u16, work: &str) -> Result<()> {
    let family = if address.contains(':') { "socket.AF_INET6" } else { "socket.AF_INET" };
    let script = format!(
        "import socket,threading,time,struct\ndef work(c):\n{work}\ns=socket.socket({family})\n\
         s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEADDR,1)\ns.bind(('{address}',{port}))\ns.listen(256)\n\
         open('/tmp/serving{port}','w').close()\n\
         while True:\n  c,_=s.accept()\n  threading.Thread(target=work,args=(c,),daemon=True).start()\n"
    );
    let path = format!("/tmp/serve{port}.py");
    sandbox.client.write_bytes(sandbox.id, &path, None, Bytes::from(script)).await?;
    sandbox.background(&format!("python3 {path}")).await?;
    sandbox
        .sh(&format!("for n in $(seq 200); do [ -e /tmp/serving{port} ] && exit 0; sleep 0.05; done; exit 1"))
        .await
        .map(drop)
}

const ECHO: &str = "  while True:\n    d=c.recv(65536)\n    if not d: break\n    c.sendall(d)\n  c.close()\n";

/// Everything received until that direction closes.
async fn read_all(tcp: &mut Tcp) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(bytes) = tcp.output.next().await? {
        all.extend_from_slice(&bytes);
    }
    Ok(all)
}

/// Each direction closes separately, in either order.
pub async fn half_closed_connections_go_on(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    refused(client.tcp(id, 4000).await.map(drop), 502, "nothing listens on port 4000")?;
    // It answers only after the end of its input.
    let count = "  n=0\n  while True:\n    d=c.recv(65536)\n    if not d: break\n    n+=len(d)\n  c.sendall(str(n).encode())\n  c.close()\n";
    serve(&sandbox, "127.0.0.1", 4001, count).await?;
    let mut tcp = client.tcp(id, 4001).await?;
    let data: Bytes = vec![7; 300_000].into();
    tcp.input.send(data).await?;
    tcp.input.finish().await?;
    ensure!(read_all(&mut tcp).await? == b"300000", "our end was not seen inside");
    tcp.output.closed().await;
    // It closes first, and still reads.
    let first = "  c.sendall(b'bye')\n  c.shutdown(socket.SHUT_WR)\n  d=b''\n  while True:\n    p=c.recv(65536)\n    if not p: break\n    d+=p\n  open('/tmp/got','wb').write(d)\n  c.close()\n";
    serve(&sandbox, "::1", 4002, first).await?;
    let mut tcp = client.tcp(id, 4002).await?;
    ensure!(read_all(&mut tcp).await? == b"bye", "its words");
    tcp.input.send(Bytes::from_static(b"still here")).await?;
    tcp.input.finish().await?;
    tcp.output.closed().await;
    let got = sandbox
        .sh("for n in $(seq 200); do [ -s /tmp/got ] && break; sleep 0.05; done; cat /tmp/got")
        .await?;
    ensure!(got == "still here", "after its end came {got:?}");
    Ok(())
}

/// A reset differs from a close, in both directions.
pub async fn resets_are_no_ends(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let reset = "  c.sendall(b'x')\n  time.sleep(0.2)\n  c.setsockopt(socket.SOL_SOCKET,socket.SO_LINGER,struct.pack('ii',1,0))\n  c.close()\n";
    serve(&sandbox, "127.0.0.1", 4003, reset).await?;
    let mut tcp = sandbox.client.tcp(sandbox.id, 4003).await?;
    let ended = read_all(&mut tcp).await;
    let is_reset = ended.as_ref().is_err_and(|error| {
        error.downcast_ref::<Error>().is_some_and(|error| matches!(error, Error::Connection(_)))
    });
    ensure!(is_reset, "a reset inside reads as {ended:?}");
    // We leave in the middle.
    let note = "  c.sendall(b'go')\n  try:\n    d=c.recv(10)\n    r='end' if not d else 'data'\n  except ConnectionResetError:\n    r='reset'\n  open('/tmp/how','w').write(r)\n";
    serve(&sandbox, "127.0.0.1", 4004, note).await?;
    let mut tcp = sandbox.client.tcp(sandbox.id, 4004).await?;
    ensure!(tcp.output.next().await?.as_deref() == Some(b"go"), "its words");
    drop(tcp);
    let how = sandbox
        .sh("for n in $(seq 200); do [ -s /tmp/how ] && break; sleep 0.05; done; cat /tmp/how")
        .await?;
    ensure!(how == "reset", "inside, our leaving reads as {how:?}");
    Ok(())
}

/// Many connections at once carry their data; unread ones do not block others.
pub async fn many_connections_and_stuck_ones(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    serve(&sandbox, "0.0.0.0", 4005, ECHO).await?;
    serve(&sandbox, "127.0.0.1", 4006, "  while True: c.sendall(bytes(65536))\n").await?;
    serve(&sandbox, "127.0.0.1", 4007, "  time.sleep(1000)\n").await?;
    let stuck = try_join_all((0..24).map(|n| async move {
        let mut tcp = client.tcp(id, if n % 2 == 0 { 4006 } else { 4007 }).await?;
        if n % 2 == 1 {
            // Until no more data is accepted.
            let piece = Bytes::from(vec![1; 64 << 10]);
            let full = async { while tcp.input.send(piece.clone()).await.is_ok() {} };
            let _ = tokio::time::timeout(Duration::from_secs(2), full).await;
        }
        anyhow::Ok(tcp)
    }))
    .await?;
    let begun = Instant::now();
    let echoed = try_join_all((0..40u8).map(|n| async move {
        let mut tcp = client.tcp(id, 4005).await?;
        let data = Bytes::from(vec![n; 100_000]);
        let Tcp { input, output } = &mut tcp;
        let send = async {
            input.send(data.clone()).await?;
            input.finish().await
        };
        let read = async {
            let mut all = Vec::new();
            while let Some(bytes) = output.next().await? {
                all.extend_from_slice(&bytes);
            }
            Ok(all)
        };
        let ((), all) = tokio::try_join!(send, read)?;
        anyhow::Ok(all == data)
    }))
    .await?;
    ensure!(echoed.iter().all(|same| *same), "a connection carried something else");
    ensure!(sandbox.sh("echo fine").await? == "fine", "a command beside stuck connections");
    let child = sandbox.fork_one().await.context("a fork beside stuck connections")?;
    ensure!(child.sh("echo child").await? == "child", "the child");
    ensure!(begun.elapsed() < within(60), "it took {:?}", begun.elapsed());
    drop(stuck);
    // A connection is a use: it wakes the sandbox.
    client.hibernate(id).await?;
    let mut tcp = client.tcp(id, 4005).await?;
    tcp.input.send(Bytes::from_static(b"hi")).await?;
    tcp.input.finish().await?;
    ensure!(read_all(&mut tcp).await? == b"hi", "after a wake by a connection");
    Ok(())
}
