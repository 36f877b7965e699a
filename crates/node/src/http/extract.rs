//! Requests into typed values. Every refusal is an [`Error`], so it has our envelope and names what is wrong.

use crate::{Error, Result};
use axum::{
    body::{Body, BodyDataStream},
    extract::{FromRequest, FromRequestParts, RawPathParams, Request},
    http::{HeaderMap, header, request::Parts},
};
use bytes::Bytes;
use futures::StreamExt;
use keiki_types::{SandboxId, SnapshotId, TemplateName};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use std::time::Duration;

/// Cap of an ordinary JSON body.
pub(super) const SMALL: usize = 1 << 20;
/// Cap of a JSON body that carries a command's standard input.
pub(super) const LARGE: usize = 64 << 20;
/// Characters of a caller's word that a sentence repeats.
const SHOWN: usize = 120;
/// How long a client may stop in the middle of a body.
pub(super) const BODY_IDLE: Duration = Duration::from_secs(60);
/// How long a body may take that is read whole before anything begins.
const BODY_WHOLE: Duration = Duration::from_secs(300);

/// The sandbox a path names. A text that is no id names none: 404.
pub(super) struct OfSandbox(pub SandboxId);
/// The port a path names.
pub(super) struct OfPort(pub u16);
/// The command a path names.
pub(super) struct OfExec(pub String);
/// The snapshot a path names.
pub(super) struct OfSnapshot(pub SnapshotId);
/// The template a path names.
pub(super) struct OfTemplate(pub TemplateName);
/// The build a path names.
pub(super) struct OfBuild(pub String);

/// Reads a sandbox's id; none has a name that is not an id.
pub(super) fn sandbox_id(text: &str) -> Result<SandboxId> {
    text.parse().map_err(|_| missing("sandbox", text))
}

/// 404 for a name that cannot be one.
pub(super) fn missing(what: &str, name: &str) -> Error {
    Error::NotFound(format!("no {what} {}", shown(name)))
}

/// A caller's word as a sentence repeats it: its beginning.
pub(super) fn shown(word: &str) -> String {
    match word.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &word[..end]),
        None => word.into(),
    }
}

async fn param<S: Send + Sync>(parts: &mut Parts, state: &S, name: &str) -> Result<String> {
    let params = RawPathParams::from_request_parts(parts, state)
        .await
        .map_err(|refusal| Error::NotFound(format!("no such route: {refusal}")))?;
    let found = params.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
    found.ok_or_else(|| Error::NotFound("no such route".into()))
}

impl<S: Send + Sync> FromRequestParts<S> for OfSandbox {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        sandbox_id(&param(parts, state, "id").await?).map(Self)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for OfPort {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let text = param(parts, state, "port").await?;
        match text.parse() {
            Ok(port @ 1..) => Ok(Self(port)),
            _ => Err(Error::Invalid(format!("the port must be from 1 to 65535, not {}", shown(&text)))),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for OfExec {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let text = param(parts, state, "exec").await?;
        // No command has a longer one, or another kind.
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if text.len() > 64 || !text.bytes().all(plain) {
            Err(missing("command", &text))
        } else {
            Ok(Self(text))
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for OfSnapshot {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let text = param(parts, state, "id").await?;
        text.parse().map(Self).map_err(|_| missing("snapshot", &text))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for OfTemplate {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let text = param(parts, state, "name").await?;
        text.parse().map(Self).map_err(|_| missing("template", &text))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for OfBuild {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let text = param(parts, state, "id").await?;
        // No build has a longer one.
        if text.len() > 64 { Err(missing("build", &text)) } else { Ok(Self(text)) }
    }
}

/// The query, typed. `+` is a space; an unknown parameter is ignored.
pub(super) struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        // The decoder below replaces what is not UTF-8, and the path of a file would silently be another's.
        if !decodes_to_utf8(parts.uri.query().unwrap_or_default()) {
            return Err(Error::Invalid("the query is not UTF-8".into()));
        }
        axum::extract::Query::try_from_uri(&parts.uri).map(|query| Self(query.0)).map_err(|refusal| {
            let text = refusal.body_text();
            Error::Invalid(text.replacen("Failed to deserialize query string", "the query is wrong", 1))
        })
    }
}

fn decodes_to_utf8(query: &str) -> bool {
    let hex = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let (bytes, mut plain) = (query.as_bytes(), Vec::with_capacity(query.len()));
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let pair = (hex(bytes.get(at + 1)), hex(bytes.get(at + 2)));
        if let (b'%', (Some(high), Some(low))) = (byte, pair) {
            plain.extend(u8::try_from(high * 16 + low));
            at += 3;
        } else {
            plain.push(*byte);
            at += 1;
        }
    }
    std::str::from_utf8(&plain).is_ok()
}

/// A yes or no in a query: `true`, `1`, `yes` or nothing after the name mean yes.
pub(super) fn flag<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    let word = String::deserialize(from)?;
    match word.to_ascii_lowercase().as_str() {
        "" | "1" | "true" | "yes" => Ok(true),
        "0" | "false" | "no" => Ok(false),
        _ => Err(serde::de::Error::custom(format!("{word:?} is neither true nor false"))),
    }
}

/// A JSON body of at most `CAP` bytes. No `Content-Type` is asked for, and no body is an empty object, because
/// clients send neither where every field is optional.
pub(super) struct Json<T, const CAP: usize = SMALL>(pub T);

impl<T: DeserializeOwned, S: Send + Sync, const CAP: usize> FromRequest<S> for Json<T, CAP> {
    type Rejection = Error;

    async fn from_request(request: Request, _: &S) -> Result<Self> {
        let (parts, body) = request.into_parts();
        parse(&read(&parts.headers, body, CAP).await?).map(Self)
    }
}

/// Reads a body whole.
pub(super) async fn read(headers: &HeaderMap, body: Body, cap: usize) -> Result<Vec<u8>> {
    let slow =
        |_| Err(Error::Slow(format!("the request body did not come within {} s", BODY_WHOLE.as_secs())));
    tokio::time::timeout(BODY_WHOLE, read_patiently(headers, body, cap)).await.unwrap_or_else(slow)
}

async fn read_patiently(headers: &HeaderMap, body: Body, cap: usize) -> Result<Vec<u8>> {
    let too_large = || Error::TooLarge(format!("the request body is larger than {} MiB", cap >> 20));
    if content_length(headers).is_some_and(|length| length > cap as u64) {
        return Err(too_large());
    }
    let (mut body, mut whole) = (body.into_data_stream(), Vec::new());
    while let Some(chunk) = next_chunk(&mut body).await {
        let chunk = chunk?;
        if whole.len() + chunk.len() > cap {
            return Err(too_large());
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(whole)
}

/// The next piece of a body, which must not take for ever.
pub(super) async fn next_chunk(body: &mut BodyDataStream) -> Option<Result<Bytes>> {
    match tokio::time::timeout(BODY_IDLE, body.next()).await {
        Ok(chunk) => chunk
            .map(|chunk| chunk.map_err(|_| Error::Invalid("the request body ended before its end".into()))),
        Err(_) => {
            Some(Err(Error::Slow(format!("the request body stopped arriving for {} s", BODY_IDLE.as_secs()))))
        }
    }
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Parses a body; the refusal says where and which field.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let body = match body.trim_ascii() {
        [] => b"{}".as_slice(),
        // serde would take a list for a struct's fields in order.
        [first, ..] if *first != b'{' => {
            return Err(Error::Invalid("the request body must be a JSON object".into()));
        }
        _ => body,
    };
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        Error::Invalid(match inner.classify() {
            serde_json::error::Category::Data if path == "." => format!("the request body is wrong: {inner}"),
            serde_json::error::Category::Data => format!("{path} is wrong: {inner}"),
            _ => format!("the request body is not valid JSON: {inner}"),
        })
    })?;
    json.end().map_err(|error| Error::Invalid(format!("the request body is not valid JSON: {error}")))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::{BODY_IDLE, BODY_WHOLE, SMALL, decodes_to_utf8, parse, read};
    use crate::Error;
    use axum::{body::Body, http::HeaderMap};
    use bytes::Bytes;
    use keiki_types::api::{CreateSandbox, ExecRequest, ForkTree};
    use std::time::Duration;

    #[test]
    fn no_body_is_an_empty_object_and_unknown_fields_are_ignored() {
        for body in ["", " \n", "{}", r#"{"volumes":[{"name":"x"}],"later":null}"#] {
            assert!(parse::<CreateSandbox>(body.as_bytes()).is_ok(), "{body}");
        }
    }

    #[test]
    fn refusals_name_the_field_or_the_position() {
        let of = |body: &str| parse::<CreateSandbox>(body.as_bytes()).unwrap_err().to_string();
        assert!(
            of(r#"{"ttl_seconds":"x"}"#).starts_with("ttl_seconds is wrong: invalid type"),
            "{}",
            of("x")
        );
        assert!(of(r#"{"metadata":{"a":1}}"#).starts_with("metadata.a is wrong"));
        assert!(of("{\"a\":1,}").contains("line 1 column 8"));
        assert!(of("{} {}").contains("not valid JSON"));
        assert!(of("[]").contains("must be a JSON object"));
        assert!(parse::<ForkTree>(b"").unwrap_err().to_string().contains("`count`"));
        assert!(
            parse::<ExecRequest>(b"{\"argv\":[1]}").unwrap_err().to_string().starts_with("argv[0] is wrong")
        );
    }

    /// A body of pieces that come one after the other, so long apart.
    fn slow_body(pieces: usize, apart: Duration) -> Body {
        Body::from_stream(futures::stream::unfold(0, move |sent| async move {
            tokio::time::sleep(apart).await;
            (sent < pieces).then(|| (Ok::<_, std::io::Error>(Bytes::from_static(b" ")), sent + 1))
        }))
    }

    /// Whoever sends a little now and then keeps a request open for so long and no longer.
    #[tokio::test(start_paused = true)]
    async fn a_body_that_trickles_is_not_waited_for_for_ever() {
        for (apart, limit, why) in [
            (Duration::from_secs(7), BODY_WHOLE, "did not come within 300 s"),
            (BODY_IDLE * 2, BODY_IDLE, "stopped arriving for 60 s"),
        ] {
            let begun = tokio::time::Instant::now();
            let said = read(&HeaderMap::new(), slow_body(usize::MAX, apart), SMALL).await.unwrap_err();
            assert!(matches!(&said, Error::Slow(text) if text.contains(why)), "{said}");
            assert!(
                (limit..limit + Duration::from_secs(1)).contains(&begun.elapsed()),
                "{:?}",
                begun.elapsed()
            );
        }
        let slow_but_whole = read(&HeaderMap::new(), slow_body(20, Duration::from_secs(7)), SMALL).await;
        assert_eq!(slow_but_whole.unwrap().len(), 20);
    }

    #[test]
    fn queries_must_decode_to_utf8() {
        for good in ["", "path=/a+b", "path=%2F%C3%A9", "100%", "%4"] {
            assert!(decodes_to_utf8(good), "{good}");
        }
        assert!(!decodes_to_utf8("path=%FF"));
        assert!(!decodes_to_utf8("path=%C3"));
    }
}
