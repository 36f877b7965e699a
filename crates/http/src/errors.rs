//! Errors as responses, in one envelope: `{"error": "<plain sentence>"}`.
//!
//! The client reads the sentence; the causes of an internal error go to the log, once, here.
//! [`enveloped`] puts axum's own rejections (unknown method, failed upgrade) into the same
//! envelope.

use axum::{
    Json,
    body::{Body, HttpBody},
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use keiki_api::Error;
use keiki_types::api::ErrorBody;

/// The sentence of an error response, kept with it for the request's log line.
#[derive(Debug, Clone)]
pub(super) struct Sentence(pub String);

/// Longest message of a library that is passed on to the client.
const LONGEST_FOREIGN: usize = 4096;

/// Characters of a caller's text that a sentence repeats.
const SHOWN: usize = 120;

pub(super) fn status(error: &Error) -> StatusCode {
    match error {
        Error::Invalid(_) => StatusCode::BAD_REQUEST,
        Error::Unauthorized => StatusCode::UNAUTHORIZED,
        Error::Forbidden(_) => StatusCode::FORBIDDEN,
        Error::NotFound(_) => StatusCode::NOT_FOUND,
        Error::Conflict(_) | Error::Failed { .. } => StatusCode::CONFLICT,
        Error::Slow(_) => StatusCode::REQUEST_TIMEOUT,
        Error::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
        Error::KeyTaken(_) => StatusCode::UNPROCESSABLE_ENTITY,
        Error::Unreachable(_) => StatusCode::BAD_GATEWAY,
        Error::Busy { .. } => StatusCode::SERVICE_UNAVAILABLE,
        Error::Timeout(_) => StatusCode::GATEWAY_TIMEOUT,
        Error::NoRoom(_) => StatusCode::INSUFFICIENT_STORAGE,
        Error::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The sentence for the client; an internal error's causes go to the log.
pub(super) fn sentence(error: &Error) -> String {
    if let Error::Internal { what, cause, .. } = error {
        let chain = cause.chain().map(ToString::to_string).collect::<Vec<_>>().join(": ");
        tracing::error!(cause = chain, "{what}");
    }
    error.to_string()
}

/// An error as a message of a stream.
pub(super) fn body(error: &Error) -> ErrorBody {
    ErrorBody { error: sentence(error), console: None }
}

/// What a handler answers.
pub(super) type Answer<T> = Result<T, Failure>;

/// An error as an answer.
#[derive(Debug)]
pub(super) struct Failure(Error);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self(error) = self;
        let console = match &error {
            Error::Internal { console, .. } | Error::Failed { console, .. } => console.clone(),
            _ => None,
        };
        let mut response = answer_with(status(&error), sentence(&error), console);
        match error {
            Error::Busy { retry_after, .. } => {
                let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
                response.headers_mut().insert(header::RETRY_AFTER, seconds.max(1).into());
            }
            Error::Unauthorized => {
                let scheme = header::HeaderValue::from_static("Bearer");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
            }
            _ => {}
        }
        response
    }
}

/// An answer in the envelope.
pub(super) fn answer(status: StatusCode, sentence: String) -> Response {
    answer_with(status, sentence, None)
}

fn answer_with(status: StatusCode, sentence: String, console: Option<String>) -> Response {
    let mut response = (status, Json(ErrorBody { error: sentence.clone(), console })).into_response();
    if let Some(length) = response.body().size_hint().exact() {
        response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    }
    response.extensions_mut().insert(Sentence(sentence));
    response
}

/// A caller's text as a sentence repeats it: its beginning.
pub(super) fn shown(word: &str) -> String {
    match word.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &word[..end]),
        None => word.into(),
    }
}

/// Puts a failure into the envelope if it is not in it yet, keeping its status and headers.
pub(super) async fn enveloped(response: Response, method: &Method, path: &str) -> Response {
    let failed = response.status().is_client_error() || response.status().is_server_error();
    if !failed || response.extensions().get::<Sentence>().is_some() {
        return response;
    }
    let (parts, body) = response.into_parts();
    let text = axum::body::to_bytes(body, LONGEST_FOREIGN).await.unwrap_or_default();
    let path = shown(path);
    let sentence = match parts.status {
        StatusCode::NOT_FOUND => format!("no such route: {method} {path}"),
        // axum adds `Allow` after this.
        StatusCode::METHOD_NOT_ALLOWED => {
            format!("{path} does not support {method}; `Allow` lists the methods it supports")
        }
        status if text.is_empty() => status.canonical_reason().unwrap_or("failed").to_lowercase(),
        _ => String::from_utf8_lossy(&text).into_owned(),
    };
    let mut wrapped = answer(parts.status, sentence);
    for (name, value) in &parts.headers {
        if name != header::CONTENT_TYPE && name != header::CONTENT_LENGTH {
            wrapped.headers_mut().insert(name, value.clone());
        }
    }
    if *method == Method::HEAD {
        *wrapped.body_mut() = Body::empty();
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::{Failure, status};
    use axum::{
        http::{StatusCode, header},
        response::IntoResponse,
    };
    use keiki_api::Error;
    use std::time::Duration;

    #[test]
    fn every_error_has_its_status() {
        let text = String::new;
        let busy = Error::Busy { why: text(), retry_after: Duration::ZERO };
        for (error, code) in [
            (Error::Invalid(text()), 400),
            (Error::Unauthorized, 401),
            (Error::Forbidden(text()), 403),
            (Error::NotFound(text()), 404),
            (Error::Conflict(text()), 409),
            (Error::Slow(text()), 408),
            (Error::TooLarge(text()), 413),
            (Error::KeyTaken(text()), 422),
            (Error::internal("x", anyhow::anyhow!("y")), 500),
            (Error::Unreachable(text()), 502),
            (busy, 503),
            (Error::Timeout(text()), 504),
            (Error::NoRoom(text()), 507),
        ] {
            assert_eq!(status(&error).as_u16(), code, "{error:?}");
        }
    }

    #[test]
    fn retry_after_is_whole_seconds_and_at_least_one() {
        for (wait, seconds) in [(0, "1"), (400, "1"), (1000, "1"), (1001, "2"), (15_000, "15")] {
            let busy = Error::Busy { why: "full".into(), retry_after: Duration::from_millis(wait) };
            let response = Failure::from(busy).into_response();
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(response.headers()[header::RETRY_AFTER], seconds, "{wait} ms");
        }
    }

    #[tokio::test]
    async fn causes_stay_out_of_the_answer() {
        let error = Error::internal("could not fork the sandbox", anyhow::anyhow!("secret path"));
        let response = Failure::from(error).into_response();
        let body = axum::body::to_bytes(response.into_body(), 1024).await.unwrap_or_default();
        assert_eq!(body.as_ref(), br#"{"error":"could not fork the sandbox"}"#);
    }
}
