//! One request to a guest, and its answer.

use super::{
    access::without,
    headers::{Outside, asks_for_websocket, to_client, to_guest},
    pass::Credentials,
};
use crate::{
    App,
    body::{holding, watched},
};
use axum::{
    body::Body,
    extract::Request,
    http::{StatusCode, Uri, Version},
    response::Response,
};
use hyper::{client::conn::http1, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use keiki_api::{Error, Result, Target};
use std::{net::IpAddr, time::Duration};
use tokio::{sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

/// How long a guest may take to start its answer, from the last byte of the request.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);
/// Largest head of an answer.
const HEAD_BYTES: usize = 64 << 10;

/// Marks an answer of a guest, which is passed on as it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FromGuest;

/// The address that a request came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub IpAddr);

/// Sends a request to a guest and streams its answer. 502 if the port gives no answer, 504 if it takes too long.
pub(super) async fn forward(
    app: &App,
    target: Target,
    outside: Outside,
    mut request: Request,
    credentials: Credentials,
) -> Result<Response> {
    let websocket = asks_for_websocket(request.headers());
    *request.uri_mut() = inside(request.uri(), &outside, credentials)?;
    *request.version_mut() = Version::HTTP_11;
    let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
    to_guest(request.headers_mut(), target, &outside, peer, credentials);
    let client = websocket.then(|| hyper::upgrade::on(&mut request));

    let dialed = app.api.dial(target.id, target.port).await?;
    let mut builder = http1::Builder::new();
    builder.max_buf_size(HEAD_BYTES);
    let (mut guest, connection) = builder
        .handshake::<_, Body>(TokioIo::new(dialed))
        .await
        .map_err(|error| no_answer(target, &error))?;
    // Ends with its holder: the answer's body, or the tunnel.
    let carried = AbortOnDropHandle::new(tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!("a connection to a guest ended: {error}");
        }
    }));
    let (parts, body) = request.into_parts();
    let (body, moved) = watched(body);
    let answer = guest.send_request(Request::from_parts(parts, body));
    let answer = answered(answer, moved, ANSWER_LIMIT).await;
    let mut answer = answer.ok_or_else(|| late(target))?.map_err(|error| no_answer(target, &error))?;
    let upgraded = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    to_client(answer.headers_mut(), target, &outside, upgraded);
    let mut response = if upgraded {
        let Some(client) = client else {
            return Err(Error::Unreachable(format!(
                "port {} in the sandbox answered with an upgrade that was not requested",
                target.port
            )));
        };
        let guest = hyper::upgrade::on(&mut answer);
        tokio::spawn(tunnel(client, guest, carried, app.closing.clone()));
        answer.map(|_| Body::empty())
    } else {
        answer.map(|body| holding(Body::new(body), carried))
    };
    response.extensions_mut().insert(FromGuest);
    Ok(response)
}

/// The request's path and query as the guest sees them.
fn inside(uri: &Uri, outside: &Outside, credentials: Credentials) -> Result<Uri> {
    let path = uri.path().strip_prefix(outside.prefix.as_str()).unwrap_or_default();
    let query = without(uri.query().unwrap_or_default(), credentials.hides());
    let mark = if query.is_empty() { "" } else { "?" };
    let path = if path.starts_with('/') { path } else { "/" };
    format!("{path}{mark}{query}")
        .parse()
        .map_err(|_| Error::Invalid("the path and query cannot be forwarded".into()))
}

/// The answer, if it comes within `limit` after the last byte of the request.
async fn answered<T>(
    answer: impl Future<Output = T>,
    moved: watch::Receiver<Instant>,
    limit: Duration,
) -> Option<T> {
    let over = async {
        loop {
            let end = *moved.borrow() + limit;
            tokio::time::sleep_until(end).await;
            if *moved.borrow() + limit <= end {
                return;
            }
        }
    };
    tokio::select! {
        answer = answer => Some(answer),
        () = over => None,
    }
}

/// Copies bytes both ways until one side ends.
async fn tunnel(
    client: OnUpgrade,
    guest: OnUpgrade,
    carried: AbortOnDropHandle<()>,
    closing: CancellationToken,
) {
    let carry = async {
        let (client, guest) = tokio::try_join!(client, guest)?;
        let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
        // The end of one direction is passed on; a reset ends both.
        tokio::io::copy_bidirectional(&mut client, &mut guest).await?;
        anyhow::Ok(())
    };
    tokio::select! {
        carried = carry => {
            if let Err(error) = carried {
                tracing::debug!("a WebSocket to a guest ended: {error}");
            }
        }
        () = closing.cancelled() => {}
    }
    drop(carried);
}

fn no_answer(target: Target, error: &hyper::Error) -> Error {
    let port = target.port;
    Error::Unreachable(if error.is_parse() || error.is_parse_too_large() {
        format!("port {port} in the sandbox does not speak HTTP/1.1")
    } else {
        format!("port {port} in the sandbox closed the connection without a complete answer")
    })
}

fn late(target: Target) -> Error {
    let limit = ANSWER_LIMIT.as_secs();
    Error::Timeout(format!("timeout: port {} in the sandbox did not answer within {limit} s", target.port))
}

#[cfg(test)]
mod tests {
    use super::{Credentials, Outside, answered, inside, watched};
    use axum::body::{Body, Bytes};
    use futures::StreamExt;
    use std::{convert::Infallible, time::Duration};

    #[tokio::test]
    async fn a_guest_is_given_up_only_once_it_has_the_request() {
        const LIMIT: Duration = Duration::from_millis(200);
        let pieces = futures::stream::iter(0..6).then(|_| async {
            tokio::time::sleep(LIMIT / 2).await;
            Ok::<_, Infallible>(Bytes::from_static(b"x"))
        });
        let (body, moved) = watched(Body::from_stream(pieces));
        let sent = async { body.into_data_stream().count().await };
        assert_eq!(answered(sent, moved.clone(), LIMIT).await, Some(6), "it was still being sent");
        let begun = std::time::Instant::now();
        assert_eq!(answered(std::future::pending::<()>(), moved, LIMIT).await, None);
        assert!(begun.elapsed() < LIMIT * 2);
    }

    #[test]
    fn a_guest_sees_its_own_paths() {
        let outside = |prefix: &str| Outside { scheme: "http", host: String::new(), prefix: prefix.into() };
        for (asked, prefix, credentials, seen) in [
            ("/p/a%2Fb?x=1", "/p", Credentials::ByPath, "/a%2Fb?x=1"),
            ("/p/?access_token=k&y", "/p", Credentials::ByPath, "/?y"),
            ("/p/", "/p", Credentials::ByPath, "/"),
            ("/p//a", "/p", Credentials::ByPath, "//a"),
            ("/x?access_token=own&keiki_pass=s", "", Credentials::Pass, "/x?access_token=own"),
            ("http://host/abs?q", "", Credentials::Pass, "/abs?q"),
        ] {
            let uri = inside(&asked.parse().unwrap(), &outside(prefix), credentials).unwrap();
            assert_eq!(uri.to_string(), seen, "{asked}");
        }
    }
}
