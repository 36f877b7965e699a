//! The node against agents that a hostile guest could run.

use super::{GuestLink, Limits, NewIdentity, Secrets, plain, refusal};
use crate::clock::Clock;
use axum::body::Body;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    body::Frame,
    header::{HeaderName, HeaderValue},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use keiki_protocol::{
    guest::{Individual, InfoRequest},
    handshake::{HELLO_LEN, Hello},
    seal::Plain,
};
use prost::Message;
use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};
use tonic::{Code, Status};
use zeroize::Zeroizing;

const LIMIT: Duration = Duration::from_millis(300);
/// Said in the handshake by agents that are as they should be.
const UPTIME: u64 = 1234;
const LIMITS: Limits = Limits { connect: LIMIT, call: LIMIT, answer: LIMIT };

/// What the agent does with every call.
#[derive(Debug, Clone, Copy)]
enum Agent {
    /// Speaks HTTP/2 and answers nothing.
    Stalls,
    /// Begins an answer and never ends it.
    HeadersOnly,
    /// Announces 4 GiB, and sends on and on.
    Huge,
    /// Says it is this generation, and says yes to all else; of itself it says nothing.
    Is(u8),
    /// Refuses with much to say.
    Talks,
}

type Piece = Result<Frame<Bytes>, Infallible>;

fn answer(agent: Agent, is_info: bool) -> hyper::Response<Body> {
    let head = hyper::Response::builder().header("content-type", "application/grpc");
    let piece = |bytes: &'static [u8]| Piece::Ok(Frame::data(Bytes::from_static(bytes)));
    let body = |pieces: BoxStream<'static, Piece>| Body::new(StreamBody::new(pieces));
    let (head, body) = match agent {
        Agent::Stalls | Agent::HeadersOnly => (head, body(futures::stream::pending().boxed())),
        Agent::Huge => {
            let more = futures::stream::repeat_with(|| Ok(Frame::data(Bytes::from(vec![0; 64 << 10]))));
            (head, body(futures::stream::iter([piece(b"\0\xff\xff\xff\xff")]).chain(more).boxed()))
        }
        Agent::Is(generation) => {
            let end = [(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))];
            // Field 1.
            let message = Bytes::copy_from_slice(&[0, 0, 0, 0, 2, 8, generation]);
            let message = if is_info { Bytes::from_static(&[0; 5]) } else { message };
            let pieces = [Ok(Frame::data(message)), Ok(Frame::trailers(end.into_iter().collect()))];
            (head, body(futures::stream::iter(pieces).boxed()))
        }
        Agent::Talks => {
            let words = format!("%1B[2J{}", "no ".repeat(2000));
            (head.header("grpc-status", "3").header("grpc-message", words), Body::empty())
        }
    };
    head.body(body).unwrap()
}

/// Shakes hands as it should, then is what it is.
async fn serve(mut stream: UnixStream, agent: Agent, calls: Calls) {
    let mut wire = [0; HELLO_LEN];
    stream.read_exact(&mut wire).await.unwrap();
    let hello = Hello::decode(&wire).unwrap();
    let uptime_ms = if matches!(agent, Agent::Is(5)) { UPTIME } else { 0 };
    stream.write_all(&Hello { uptime_ms, ..Hello::new(4, hello.nonce) }.encode()).await.unwrap();
    // What the node repeated meanwhile is skipped, as the real agent does.
    let mut ahead = vec![0; 3];
    stream.read_exact(&mut ahead).await.unwrap();
    while ahead == wire[..3] {
        stream.read_exact(&mut wire[3..]).await.unwrap();
        stream.read_exact(&mut ahead).await.unwrap();
    }
    let (read, write) = stream.into_split();
    let io = TokioIo::new(tokio::io::join(std::io::Cursor::new(ahead).chain(read), write));
    let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let calls = Arc::clone(&calls);
        async move {
            let path = request.uri().path().to_owned();
            let is_info = path.ends_with("/Info");
            let body = request.into_body().collect().await.unwrap().to_bytes();
            calls.lock().unwrap().push((path, body));
            if matches!(agent, Agent::Stalls) {
                futures::future::pending::<()>().await;
            }
            Ok::<_, Infallible>(answer(agent, is_info))
        }
    });
    let _ =
        hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await;
}

async fn link(dir: &tempfile::TempDir, agent: Agent) -> GuestLink {
    asked(dir, agent).await.0
}

/// What an agent was asked: paths, and bodies as they came.
type Calls = Arc<Mutex<Vec<(String, Bytes)>>>;

async fn asked(dir: &tempfile::TempDir, agent: Agent) -> (GuestLink, Calls) {
    let calls = Calls::default();
    let served = Arc::clone(&calls);
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, agent, Arc::clone(&served)));
        }
    });
    let link = GuestLink::connect_within(Limits { connect: Duration::from_secs(10), ..LIMITS }, &socket, 5);
    (link.await.unwrap(), calls)
}

#[tokio::test]
async fn every_call_ends_and_says_one_thing() {
    for (agent, clue) in [
        (Agent::Stalls, "no answer within 300 ms"),
        (Agent::HeadersOnly, "no answer within 300 ms"),
        (Agent::Huge, "message length too large"),
        (Agent::Talks, "no no no"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let link = link(&dir, agent).await;
        let started = Instant::now();
        let gate = link.individualize(NewIdentity::named(keiki_types::Origin::Fork, "h")).await.unwrap_err();
        let flush = link.flush().await.unwrap_err();
        let user = link.freeze_user().await.unwrap_err();
        let info = link.call(|mut guest| async move { guest.info(InfoRequest {}).await }).await.unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(5), "{agent:?}: {:?}", started.elapsed());
        for (said, what) in [(&gate, "identity"), (&flush, "disk"), (&user, "processes")] {
            let said = said.to_string();
            assert!(said.contains(what) && said.contains(clue), "{agent:?}: {said}");
            assert!(said.len() < 500 && !said.contains(char::is_control), "{agent:?}: {said:?}");
        }
        assert!(info.message().contains(clue), "{agent:?}: {info}");
    }
}

#[tokio::test]
async fn another_generation_is_no_acknowledgement() {
    let dir = tempfile::tempdir().unwrap();
    let link = link(&dir, Agent::Is(6)).await;
    let error = link.individualize(NewIdentity::named(keiki_types::Origin::Fork, "h")).await.unwrap_err();
    assert!(error.to_string().contains("acknowledged generation 6 instead of 5"), "{error}");
}

#[tokio::test]
async fn user_processes_go_on_only_after_the_acknowledgement_was_found_right() {
    const GATE: &str = "/keiki.guest.v1.Guest/Individualize";
    for (agent, expected) in
        [(Agent::Is(5), &[GATE, "/keiki.guest.v1.Guest/ThawUser"][..]), (Agent::Is(6), &[GATE])]
    {
        let dir = tempfile::tempdir().unwrap();
        let (link, calls) = asked(&dir, agent).await;
        let new = NewIdentity::named(keiki_types::Origin::Fork, "h");
        assert_eq!(link.release(new, &mut Clock::start()).await.is_ok(), expected.len() == 2);
        let mut calls = calls.lock().unwrap();
        // Asking for the guest's clock lets nothing go on. It is asked for where the handshake did not tell, or was slow.
        let all = calls.len();
        calls.retain(|(path, _)| !path.ends_with("/Info"));
        let was_asked = all > calls.len();
        assert_eq!(calls.iter().map(|(path, _)| path.as_str()).collect::<Vec<_>>(), expected);
        // Nor does the order itself let them.
        let order = Individual::decode(&calls[0].1[5..]).unwrap();
        assert!(!order.thaw_user && order.generation == 5, "{order:?}");
        assert!(was_asked || order.uptime_ms == UPTIME, "{order:?}");
    }
}

#[tokio::test]
async fn secrets_do_not_cross_in_the_clear() {
    let secret =
        Plain { name: "KEY".into(), owner: String::new(), value: Zeroizing::new(b"hush-hush".to_vec()) };
    let new = NewIdentity {
        secrets: Secrets { give: vec![secret], keep: vec![] },
        ..NewIdentity::named(keiki_types::Origin::Create, "h")
    };
    let dir = tempfile::tempdir().unwrap();
    // Its key is no key: then nothing is sent at all.
    let (link, calls) = asked(&dir, Agent::Is(5)).await;
    let error = link.individualize(new).await.unwrap_err();
    assert!(error.to_string().contains("did not make a key for its secrets"), "{error}");
    let calls = calls.lock().unwrap();
    assert_eq!(calls.len(), 1);
    assert!(calls[0].0.ends_with("/SecretKey") && !calls[0].1.windows(4).any(|four| four == b"hush"));
}

#[tokio::test]
async fn an_agent_that_says_nothing_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let error = GuestLink::connect_within(LIMITS, &socket, 5).await.err().unwrap();
    assert_eq!(error.to_string(), "the guest's agent does not answer");
}

#[test]
fn a_guests_words_are_few_and_plain() {
    assert_eq!(plain("a\x1b[31mb\nc"), "a [31mb c");
    assert_eq!(plain(&"é".repeat(1000)).chars().count(), 301);
    let status = Status::new(Code::InvalidArgument, format!("\x07{}", "x".repeat(10_000)));
    let said = refusal(&status).to_string();
    assert!(said.len() < 320 && !said.contains('\x07'), "{said}");
}

#[test]
fn what_fails_in_the_guest_is_no_failure_of_the_node() {
    use crate::error::Error;
    let said = refusal(&Status::new(Code::Internal, "/proc/self/mem: Input/output error"));
    assert!(matches!(&said, Error::Conflict(text) if text.contains("/proc/self/mem")), "{said}");
    let transport = Status::from_error(Box::new(std::io::Error::other("reset")));
    assert!(matches!(refusal(&transport), Error::Internal { .. }));
    assert!(matches!(refusal(&Status::new(Code::Internal, "")), Error::Internal { .. }));
}
