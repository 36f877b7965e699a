//! Requests into typed values. Every refusal is an [`Error`], so it comes in the envelope and names what is wrong.

use crate::errors::{Answer, Failure, shown};
use axum::{
    body::{Body, BodyDataStream},
    extract::{FromRequest, FromRequestParts, RawPathParams, Request},
    http::{HeaderMap, header, request::Parts},
};
use bytes::Bytes;
use futures::StreamExt;
use keiki_api::{Error, Result};
use keiki_types::{SandboxId, SnapshotId, TemplateName};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use std::time::Duration;

/// Largest ordinary JSON body.
pub(super) const SMALL: usize = 1 << 20;
/// Largest JSON body with a command's standard input.
pub(super) const LARGE: usize = 64 << 20;
/// How long a client may pause in the middle of a body.
pub(super) const BODY_IDLE: Duration = Duration::from_secs(60);
/// How long a body may take that is read before anything starts.
const BODY_WHOLE: Duration = Duration::from_secs(300);

/// Extractors of one path parameter.
macro_rules! from_path {
    ($($(#[$doc:meta])* $name:ident($type:ty) = $param:literal, $parse:expr;)*) => {$(
        $(#[$doc])*
        pub(super) struct $name(pub $type);

        impl<S: Send + Sync> FromRequestParts<S> for $name {
            type Rejection = Failure;

            async fn from_request_parts(parts: &mut Parts, state: &S) -> Answer<Self> {
                let parse: fn(&str) -> Result<$type> = $parse;
                Ok(Self(parse(&param(parts, state, $param).await?)?))
            }
        }
    )*};
}

from_path! {
/// A sandbox. A text that is not an id is 404.
    SandboxPath(SandboxId) = "id", sandbox_id;
    /// A port.
    PortPath(u16) = "port", port;
    /// A command.
    ExecPath(String) = "exec", exec;
    /// A snapshot.
    SnapshotPath(SnapshotId) = "id", |text| text.parse().map_err(|_| missing("snapshot", text));
    /// A template.
    TemplatePath(TemplateName) = "name", |text| text.parse().map_err(|_| missing("template", text));
    /// A build.
    BuildPath(String) = "id", build;
}

/// Reads a sandbox id; 404 for a text that is not one.
pub(super) fn sandbox_id(text: &str) -> Result<SandboxId> {
    text.parse().map_err(|_| missing("sandbox", text))
}

fn port(text: &str) -> Result<u16> {
    match text.parse() {
        Ok(port @ 1..) => Ok(port),
        _ => Err(Error::Invalid(format!("the port must be from 1 to 65535, not {}", shown(text)))),
    }
}

fn exec(text: &str) -> Result<String> {
    // No command has a longer id, or one with other characters.
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if text.len() <= 64 && text.bytes().all(plain) { Ok(text.into()) } else { Err(missing("command", text)) }
}

fn build(text: &str) -> Result<String> {
    // No build has a longer id.
    if text.len() <= 64 { Ok(text.into()) } else { Err(missing("build", text)) }
}

/// 404 for a text that cannot be a name.
fn missing(what: &str, name: &str) -> Error {
    Error::NotFound(format!("no {what} {}", shown(name)))
}

async fn param<S: Send + Sync>(parts: &mut Parts, state: &S, name: &str) -> Result<String> {
    let params = RawPathParams::from_request_parts(parts, state)
        .await
        .map_err(|refusal| Error::NotFound(format!("no such route: {refusal}")))?;
    let found = params.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
    found.ok_or_else(|| Error::NotFound("no such route".into()))
}

/// The typed query. `+` is a space; unknown parameters are ignored.
pub(super) struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        // The decoder below replaces what is not UTF-8, which would silently turn one file's path into another's.
        if !decodes_to_utf8(parts.uri.query().unwrap_or_default()) {
            return Err(Error::Invalid("the query is not UTF-8".into()).into());
        }
        let query = axum::extract::Query::try_from_uri(&parts.uri).map_err(|refusal| {
            let text = refusal.body_text();
            Error::Invalid(text.replacen("Failed to deserialize query string", "the query is invalid", 1))
        })?;
        Ok(Self(query.0))
    }
}

fn decodes_to_utf8(query: &str) -> bool {
    percent_decode_str(query).decode_utf8().is_ok()
}

/// A flag in a query: `true`, `1`, `yes` or no value mean true.
pub(super) fn flag<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    let word = String::deserialize(from)?;
    match word.to_ascii_lowercase().as_str() {
        "" | "1" | "true" | "yes" => Ok(true),
        "0" | "false" | "no" => Ok(false),
        _ => Err(serde::de::Error::custom(format!("{word:?} is neither true nor false"))),
    }
}

/// A JSON body of at most `CAP` bytes. It needs no `Content-Type`, and a missing body is an empty object, because clients
/// send neither where every field is optional.
pub(super) struct Json<T, const CAP: usize = SMALL>(pub T);

impl<T: DeserializeOwned, S: Send + Sync, const CAP: usize> FromRequest<S> for Json<T, CAP> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Answer<Self> {
        let (parts, body) = request.into_parts();
        Ok(Self(parse(&read(&parts.headers, body, CAP).await?)?))
    }
}

/// Reads a whole body.
pub(super) async fn read(headers: &HeaderMap, body: Body, cap: usize) -> Result<Vec<u8>> {
    let slow =
        |_| Err(Error::Slow(format!("the request body did not arrive within {} s", BODY_WHOLE.as_secs())));
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

/// The next piece of a body, with a time limit.
pub(super) async fn next_chunk(body: &mut BodyDataStream) -> Option<Result<Bytes>> {
    match tokio::time::timeout(BODY_IDLE, body.next()).await {
        Ok(chunk) => {
            chunk.map(|chunk| chunk.map_err(|_| Error::Invalid("the request body ended early".into())))
        }
        Err(_) => {
            Some(Err(Error::Slow(format!("the request body stopped arriving for {} s", BODY_IDLE.as_secs()))))
        }
    }
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Parses a body; an error names the field or the position.
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
            serde_json::error::Category::Data if path == "." => {
                format!("the request body is invalid: {inner}")
            }
            serde_json::error::Category::Data => format!("{path} is invalid: {inner}"),
            _ => format!("the request body is not valid JSON: {inner}"),
        })
    })?;
    json.end().map_err(|error| Error::Invalid(format!("the request body is not valid JSON: {error}")))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::{BODY_IDLE, BODY_WHOLE, SMALL, decodes_to_utf8, parse, read};
    use axum::{body::Body, http::HeaderMap};
    use bytes::Bytes;
    use keiki_api::Error;
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
            of(r#"{"ttl_seconds":"x"}"#).starts_with("ttl_seconds is invalid: invalid type"),
            "{}",
            of("x")
        );
        assert!(of(r#"{"metadata":{"a":1}}"#).starts_with("metadata.a is invalid"));
        assert!(of("{\"a\":1,}").contains("line 1 column 8"));
        assert!(of("{} {}").contains("not valid JSON"));
        assert!(of("[]").contains("must be a JSON object"));
        assert!(parse::<ForkTree>(b"").unwrap_err().to_string().contains("`count`"));
        assert!(
            parse::<ExecRequest>(b"{\"argv\":[1]}")
                .unwrap_err()
                .to_string()
                .starts_with("argv[0] is invalid")
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
            (Duration::from_secs(7), BODY_WHOLE, "did not arrive within 300 s"),
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
