//! An agent that does what the test asks, and records every call.

use bytes::BytesMut;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use keiki_engine::fake::Agent;
use keiki_protocol::{
    gate::{Call, reply, take_call},
    guest::{IdentityAck, SecretKeyReply, ThawUserReply},
    handshake::{HELLO_LEN, Hello},
};
use parking_lot::Mutex;
use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// The agents of all machines.
#[derive(Default)]
pub(super) struct Agents {
    /// What they were asked for.
    asked: Mutex<Vec<String>>,
    /// What one of them refuses next.
    refuses: Mutex<Option<&'static str>>,
}

impl Agents {
    pub(super) fn take_asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock())
    }

    pub(super) fn refuse(&self, what: &'static str) {
        *self.refuses.lock() = Some(what);
    }

    /// Whether it is done.
    fn ask(&self, what: &str) -> bool {
        self.asked.lock().push(what.into());
        self.refuses.lock().take_if(|refused| *refused == what).is_none()
    }
}

pub(super) fn agent(agents: &Arc<Agents>) -> Agent {
    let agents = Arc::clone(agents);
    Arc::new(move |listener| {
        let (agents, generation) = (Arc::clone(&agents), Arc::new(AtomicU64::new(0)));
        Box::pin(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&agents), Arc::clone(&generation)));
            }
        })
    })
}

async fn serve(mut stream: UnixStream, agents: Arc<Agents>, generation: Arc<AtomicU64>) {
    let (mut bytes, mut met): (BytesMut, Option<Hello>) = (BytesMut::new(), None);
    loop {
        while let Some(head) = bytes.first_chunk::<HELLO_LEN>()
            && let Ok(hello) = Hello::decode(head)
        {
            drop(bytes.split_to(HELLO_LEN));
            if met.replace(hello) != Some(hello) {
                let ours = Hello::new(generation.load(Ordering::SeqCst), hello.nonce);
                if stream.write_all(&ours.encode()).await.is_err() {
                    return;
                }
            }
        }
        match bytes.first() {
            Some(b'P') => break,
            Some(1..=3) => {
                if let Some(call) = take_call(&mut bytes).unwrap() {
                    if stream.write_all(&answer(&call, &agents, &generation)).await.is_err() {
                        return;
                    }
                    continue;
                }
            }
            _ => {}
        }
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let (read, write) = stream.into_split();
    let io = TokioIo::new(tokio::io::join(AsyncReadExt::chain(&bytes[..], read), write));
    let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let agents = Arc::clone(&agents);
        async move {
            let what = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            let _ = request.into_body().collect().await;
            let status = if agents.ask(&what) { "0" } else { "13" };
            // An empty message is a reply of any kind.
            let frames = [
                Ok::<_, Infallible>(Frame::data(bytes::Bytes::from_static(b"\0\0\0\0\0"))),
                Ok(Frame::trailers(
                    [("grpc-status".parse().unwrap(), status.parse().unwrap())].into_iter().collect(),
                )),
            ];
            let body = StreamBody::new(futures::stream::iter(frames));
            let head = hyper::Response::builder().header("content-type", "application/grpc");
            Ok::<_, Infallible>(head.body(body).unwrap())
        }
    });
    let _ =
        hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await;
}

fn answer(call: &Call, agents: &Agents, generation: &AtomicU64) -> Vec<u8> {
    match call {
        Call::SecretKey(_) => reply(&Ok(SecretKeyReply { public_key: "k".into() })),
        Call::AssumeIdentity(identity) => {
            let is_done = agents.ask("AssumeIdentity");
            generation.store(identity.generation, Ordering::SeqCst);
            let generation = identity.generation + u64::from(!is_done);
            reply(&Ok(IdentityAck { generation, steps: Vec::new() }))
        }
        Call::ThawUser(_) => {
            agents.ask("ThawUser");
            reply(&Ok(ThawUserReply { micros: 1 }))
        }
    }
    .to_vec()
}
