//! The node against agents that a hostile guest could run.

use super::{Gate, GuestLink, Secrets, link::Limits, plain, refusal};
use crate::error::Error;
use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures::{StreamExt, stream::BoxStream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use keiki_protocol::{
    gate::{Call, call, reply, take_call},
    guest::{Identity, IdentityAck, InfoRequest, SecretKeyReply, StepTime, ThawUserReply, ThawUserRequest},
    handshake::{HELLO_LEN, Hello, OLDEST},
    seal::Plain,
};
use keiki_sys::stopwatch::Stopwatch;
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
const LIMITS: Limits = Limits { connect: Duration::from_secs(10), call: LIMIT, answer: LIMIT };

/// What the agent does with every call over HTTP/2.
#[derive(Debug, Clone, Copy)]
enum Agent {
    /// Speaks HTTP/2 and answers nothing.
    Stalls,
    /// Begins an answer and never ends it.
    HeadersOnly,
    /// Announces 4 GiB, and sends on and on.
    Huge,
    /// Refuses with much to say.
    Talks,
}

/// What it does at the release gate, before that.
type AtGate = fn(&Hello, &Call) -> Vec<u8>;

/// A correct agent: acknowledges the generation it gets.
fn obeys(_: &Hello, call: &Call) -> Vec<u8> {
    acknowledges(5, call)
}

fn acknowledges(generation: u64, call: &Call) -> Vec<u8> {
    let steps = vec![StepTime { step: "a\x1b[2Jb".into(), micros: 1 }; 100];
    match call {
        // No key.
        Call::SecretKey(_) => reply(&Ok(SecretKeyReply { public_key: "k".into() })),
        Call::AssumeIdentity(_) => reply(&Ok(IdentityAck { generation, steps })),
        Call::ThawUser(_) => reply(&Ok(ThawUserReply { micros: 1 })),
    }
    .to_vec()
}

type Piece = Result<Frame<Bytes>, Infallible>;

fn answer(agent: Agent) -> hyper::Response<Body> {
    let head = hyper::Response::builder().header("content-type", "application/grpc");
    let piece = |bytes: &'static [u8]| Piece::Ok(Frame::data(Bytes::from_static(bytes)));
    let body = |pieces: BoxStream<'static, Piece>| Body::new(StreamBody::new(pieces));
    let (head, body) = match agent {
        Agent::Stalls | Agent::HeadersOnly => (head, body(futures::stream::pending().boxed())),
        Agent::Huge => {
            let more = futures::stream::repeat_with(|| Ok(Frame::data(Bytes::from(vec![0; 64 << 10]))));
            (head, body(futures::stream::iter([piece(b"\0\xff\xff\xff\xff")]).chain(more).boxed()))
        }
        Agent::Talks => {
            let words = format!("%1B[2J{}", "no ".repeat(2000));
            (head.header("grpc-status", "3").header("grpc-message", words), Body::empty())
        }
    };
    head.body(body).unwrap()
}

/// What an agent was asked at the gate: as it came, and what it is.
type Calls = Arc<Mutex<Vec<(Bytes, Call)>>>;

/// An agent behind a socket.
struct Peer {
    dir: tempfile::TempDir,
    calls: Calls,
    /// How often it was said hello to.
    hellos: Arc<Mutex<usize>>,
}

/// How an agent of this test is wrong.
#[derive(Clone, Copy)]
struct Ways {
    at_gate: AtGate,
    agent: Agent,
    /// Its answer to a hello comes so late.
    late: Duration,
}

/// Said in the handshake.
const GENERATION: u64 = 4;

const GOOD: Ways = Ways { at_gate: obeys, agent: Agent::Stalls, late: Duration::ZERO };

impl Peer {
    fn new(ways: Ways) -> Self {
        let peer =
            Self { dir: tempfile::tempdir().unwrap(), calls: Calls::default(), hellos: Arc::default() };
        let listener = UnixListener::bind(peer.dir.path().join("agent.sock")).unwrap();
        let (calls, hellos) = (Arc::clone(&peer.calls), Arc::clone(&peer.hellos));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, ways, Arc::clone(&calls), Arc::clone(&hellos)));
            }
        });
        peer
    }

    async fn gate(&self) -> Gate {
        Gate::open_within(LIMITS, &self.dir.path().join("agent.sock"), 5).await.unwrap()
    }

    async fn release(&self, secrets: Secrets) -> crate::error::Result<GuestLink> {
        self.gate().await.release(named(), secrets, &mut Stopwatch::start()).await
    }

    /// What it was asked, by name.
    fn asked(&self) -> Vec<&'static str> {
        let calls = self.calls.lock().unwrap();
        let name = |call: &Call| match call {
            Call::SecretKey(_) => "key",
            Call::AssumeIdentity(_) => "identity",
            Call::ThawUser(_) => "thaw",
        };
        calls.iter().map(|(_, call)| name(call)).collect()
    }
}

fn named() -> Identity {
    Identity {
        hostname: "h".into(),
        reason: "fork".into(),
        is_new: true,
        run_hooks: true,
        ..Identity::default()
    }
}

/// Shakes hands, answers calls of the gate, then is what it is.
async fn serve(mut stream: UnixStream, ways: Ways, calls: Calls, hellos: Arc<Mutex<usize>>) {
    let (mut bytes, mut met): (BytesMut, Option<Hello>) = (BytesMut::new(), None);
    loop {
        while let Some(head) = bytes.first_chunk::<HELLO_LEN>()
            && let Ok(hello) = Hello::decode(head)
        {
            drop(bytes.split_to(HELLO_LEN));
            // What the node repeats is skipped, as the real agent does.
            if met.replace(hello) != Some(hello) {
                *hellos.lock().unwrap() += 1;
                tokio::time::sleep(ways.late).await;
                let ours = Hello { uptime_ms: UPTIME, ..Hello::new(GENERATION, hello.nonce) };
                stream.write_all(&ours.encode()).await.unwrap();
            }
        }
        match (bytes.first(), met) {
            (Some(b'P'), _) => break,
            (Some(1..=3), Some(hello)) => {
                let before = bytes.clone();
                if let Some(call) = take_call(&mut bytes).unwrap() {
                    let answer = (ways.at_gate)(&hello, &call);
                    let size = before.len() - bytes.len();
                    calls.lock().unwrap().push((before.freeze().split_to(size), call));
                    // The node may have had enough of it.
                    if stream.write_all(&answer).await.is_err() {
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
    let service =
        hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| async move {
            request.into_body().collect().await.unwrap();
            if matches!(ways.agent, Agent::Stalls) {
                futures::future::pending::<()>().await;
            }
            Ok::<_, Infallible>(answer(ways.agent))
        });
    let _ =
        hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await;
}

#[tokio::test]
async fn every_call_ends_and_says_one_thing() {
    for (agent, clue) in [
        (Agent::Stalls, "no answer within 300 ms"),
        (Agent::HeadersOnly, "no answer within 300 ms"),
        (Agent::Huge, "message length too large"),
        (Agent::Talks, "no no no"),
    ] {
        let peer = Peer::new(Ways { agent, ..GOOD });
        let link = peer.release(Secrets::default()).await.unwrap();
        let started = Instant::now();
        let flush = link.flush().await.unwrap_err();
        let user = link.freeze_user().await.unwrap_err();
        let info = link.call(InfoRequest {}, |mut guest, request| async move { guest.info(request).await });
        let info = info.await.unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(5), "{agent:?}: {:?}", started.elapsed());
        for (said, what) in [(&flush, "disk"), (&user, "processes")] {
            let said = said.to_string();
            assert!(said.contains(what) && said.contains(clue), "{agent:?}: {said}");
            assert!(said.len() < 500 && !said.contains(char::is_control), "{agent:?}: {said:?}");
        }
        assert!(info.message().contains(clue), "{agent:?}: {info}");
    }
}

/// Whatever a hostile agent answers at the gate, the copy is not released, within a bounded time
/// and with one clear sentence.
#[tokio::test]
async fn a_hostile_agent_is_not_released() {
    let ways: [(&str, AtGate, &str); 13] = [
        ("silence", |_, _| vec![], "no answer within 300 ms"),
        ("half a reply", |_, _| vec![0, 9, 0, 0, 0, 8], "no answer within 300 ms"),
        (
            "4 GiB",
            |_, _| [&[0, 0xff, 0xff, 0xff, 0xff][..], &[0; 1 << 20]].concat(),
            "a message of 4294967295 bytes",
        ),
        ("garbage", |_, _| vec![0x55; 4096], "unknown reply code: 85"),
        ("no message", |_, _| vec![0, 2, 0, 0, 0, 8, 0xff], "malformed"),
        ("its hello on and on", |hello, _| [hello.encode(); 4000].concat(), "no answer within 300 ms"),
        ("another hello", |_, _| Hello::new(5, [7; 16]).encode().to_vec(), "unknown reply code: 255"),
        ("half of its hello", |hello, _| hello.encode()[..40].to_vec(), "no answer within 300 ms"),
        ("HTTP/2", |_, _| b"PRI * HTTP/2.0\r\n\r\n".to_vec(), "unknown reply code: 80"),
        (
            "a refusal",
            |_, _| reply::<ThawUserReply>(&Err(Status::internal("no \x1b[2J".repeat(3000)))).to_vec(),
            "no  [2J",
        ),
        ("nothing said", |_, _| vec![0, 0, 0, 0, 0], "acknowledged generation 0 instead of 5"),
        ("the generation before", |_, call| acknowledges(4, call), "acknowledged generation 4 instead of 5"),
        ("another generation", |_, call| acknowledges(6, call), "acknowledged generation 6 instead of 5"),
    ];
    for (what, at_gate, clue) in ways {
        let peer = Peer::new(Ways { at_gate, ..GOOD });
        let started = Instant::now();
        let error = peer.release(Secrets::default()).await.err().expect(what).to_string();
        assert!(started.elapsed() < Duration::from_secs(5), "{what}: {:?}", started.elapsed());
        assert!(error.contains("did not assume its new identity") && error.contains(clue), "{what}: {error}");
        assert!(error.len() < 500 && !error.contains(char::is_control), "{what}: {error:?}");
        assert_eq!(peer.asked(), ["identity"], "{what}: its processes go on");
    }
}

#[tokio::test]
async fn an_agent_that_lets_nothing_go_on_is_not_released() {
    let thaws: [(&str, AtGate, &str); 3] = [
        (
            "silence",
            |_, call| if matches!(call, Call::ThawUser(_)) { vec![] } else { acknowledges(5, call) },
            "no answer",
        ),
        ("ahead", |_, call| [acknowledges(5, call), acknowledges(5, call)].concat(), "before it was asked"),
        (
            "a refusal",
            |_, call| match call {
                Call::ThawUser(_) => reply::<ThawUserReply>(&Err(Status::internal("it is busy"))).to_vec(),
                call => acknowledges(5, call),
            },
            "it is busy",
        ),
    ];
    for (what, at_gate, clue) in thaws {
        let error = Peer::new(Ways { at_gate, ..GOOD })
            .release(Secrets::default())
            .await
            .err()
            .expect(what)
            .to_string();
        assert!(error.contains("did not thaw its processes") && error.contains(clue), "{what}: {error}");
    }
}

#[tokio::test]
async fn user_processes_go_on_only_after_the_acknowledgement_was_found_right() {
    let peer = Peer::new(GOOD);
    let mut watch = Stopwatch::start();
    peer.gate().await.release(named(), Secrets::default(), &mut watch).await.unwrap();
    assert_eq!(peer.asked(), ["identity", "thaw"]);
    let calls = peer.calls.lock().unwrap();
    let Call::AssumeIdentity(order) = &calls[0].1 else { panic!("{calls:?}") };
    assert_eq!((order.generation, order.uptime_ms), (5, UPTIME));
    assert_eq!(calls[1].0, call(&ThawUserRequest {}));
    // Part of its error text is passed on, without control characters.
    let steps = &watch.steps().0;
    let told: Vec<_> = steps.iter().filter(|(name, _)| name.starts_with("guest:")).collect();
    assert_eq!((told.len(), told[0].0.as_ref()), (16, "guest:a [2Jb"));
}

#[tokio::test]
async fn a_slow_answer_tells_no_time_and_hello_is_said_again() {
    // Longer than a round trip that is believed.
    let peer = Peer::new(Ways { late: Duration::from_millis(40), ..GOOD });
    peer.release(Secrets::default()).await.unwrap();
    assert_eq!(*peer.hellos.lock().unwrap(), 5);
    assert_eq!(peer.asked(), ["identity", "thaw"]);
}

#[tokio::test]
async fn secrets_do_not_cross_in_the_clear() {
    let secret =
        Plain { name: "KEY".into(), owner: String::new(), value: Zeroizing::new(b"hush-hush".to_vec()) };
    let secrets = Secrets { give: vec![secret], keep: vec![] };
    // Its key is not valid: then nothing is sent.
    let peer = Peer::new(GOOD);
    let error = peer.release(secrets).await.err().unwrap();
    assert!(error.to_string().contains("did not create a key for its secrets"), "{error}");
    assert_eq!(peer.asked(), ["key"]);
    assert!(!peer.calls.lock().unwrap()[0].0.windows(4).any(|four| four == b"hush"));
}

#[tokio::test]
async fn an_agent_that_says_nothing_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    let limits = Limits { connect: LIMIT, ..LIMITS };
    let error = Gate::open_within(limits, &socket, 5).await.err().unwrap();
    assert_eq!(error.to_string(), "the guest's agent does not answer");
}

#[tokio::test]
async fn only_a_machine_that_was_released_is_connected_to_again() {
    let peer = Peer::new(GOOD);
    let socket = peer.dir.path().join("agent.sock");
    GuestLink::connect(&socket, GENERATION).await.unwrap();
    let error = GuestLink::connect(&socket, GENERATION + 1).await.err().unwrap();
    assert_eq!(error.to_string(), "the machine was not released");
}

#[tokio::test]
async fn an_agent_of_another_version_is_told_of_in_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut wire = [0; HELLO_LEN];
            stream.read_exact(&mut wire).await.unwrap();
            let nonce = Hello::decode(&wire).unwrap().nonce;
            let hello = Hello { version: OLDEST - 1, oldest: 1, ..Hello::new(4, nonce) };
            stream.write_all(&hello.encode()).await.unwrap();
        }
    });
    let gate = Gate::open_within(LIMITS, &socket, 5).await.err().unwrap();
    let link = GuestLink::connect(&socket, 5).await.err().unwrap();
    let call = refusal(&Status::unimplemented("unknown method"));
    for error in [gate, link, call] {
        assert!(matches!(&error, Error::Conflict(why) if why.contains("keiki template rebake")), "{error}");
    }
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
    let said = refusal(&Status::new(Code::Internal, "/proc/self/mem: Input/output error"));
    assert!(matches!(&said, Error::Conflict(text) if text.contains("/proc/self/mem")), "{said}");
    let transport = Status::from_error(Box::new(std::io::Error::other("reset")));
    assert!(matches!(refusal(&transport), Error::Internal { .. }));
    assert!(matches!(refusal(&Status::new(Code::Internal, "")), Error::Internal { .. }));
}
