//! What the HTTP library refuses before there is a request (a head that cannot be parsed or is too large) is an answer
//! without a word. Here it gets the envelope of all other refusals.
//!
//! The library writes such an answer by itself, so it is known by where it stands: nothing is being answered
//! ([`Answering`] is held by each request from its head to the end of its answer's body), everything before it was
//! flushed, and it is a whole head with an empty body. An upgraded connection is left alone for ever.

use super::body::holding;
use axum::{http::StatusCode, response::Response};
use bytes::Bytes;
use keiki_types::api::ErrorBody;
use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Requests of one connection that are being answered.
#[derive(Debug, Clone, Default)]
pub(super) struct Answered(Arc<AtomicUsize>);

/// One of them.
#[derive(Debug)]
pub(super) struct Answering(Answered);

impl Answered {
    pub(super) fn begin(&self) -> Answering {
        self.0.fetch_add(1, Ordering::AcqRel);
        Answering(self.clone())
    }

    fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

impl Answering {
    /// Lasts until the body has been sent; after an upgrade as long as the connection.
    pub(super) fn until_sent(self, response: Response) -> Response {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            std::mem::forget(self);
            return response;
        }
        response.map(|body| holding(body, self))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A connection whose wordless refusals are said properly.
pub(super) struct Spoken<T> {
    inner: T,
    answered: Answered,
    /// What is written instead.
    instead: Bytes,
    /// Everything before was flushed.
    clean: bool,
}

impl<T> Spoken<T> {
    pub(super) fn new(inner: T, answered: Answered) -> Self {
        Self { inner, answered, instead: Bytes::new(), clean: true }
    }
}

/// An answer that is written by hand; the connection ends with it.
pub(super) fn by_hand(status: StatusCode, sentence: &str, more: &str) -> Bytes {
    let body = super::sse::ascii_json(&ErrorBody { error: sentence.into(), console: None });
    let reason = status.canonical_reason().unwrap_or("Refused");
    format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{more}connection: close\r\n\r\n{body}",
        status.as_u16(),
        body.len()
    )
    .into()
}

/// What to write instead of a refusal without a word; None for anything else.
fn words(written: &[u8]) -> Option<Bytes> {
    let head = std::str::from_utf8(written).ok()?.strip_prefix("HTTP/1.")?;
    let (_, rest) = head.split_once(' ')?;
    let status: u16 = rest.get(..3)?.parse().ok()?;
    let empty = rest.ends_with("\r\n\r\n") && rest.to_ascii_lowercase().contains("\r\ncontent-length: 0\r\n");
    if !empty {
        return None;
    }
    let sentence = match status {
        400 => "this is no HTTP/1.1 request",
        414 => "the request's path and query are too long: they have to fit into 64 KiB, with all headers",
        431 => "the request's head is too large: at most 100 headers, and 64 KiB with path and query",
        _ => return None,
    };
    Some(by_hand(StatusCode::from_u16(status).ok()?, sentence, ""))
}

impl<T: AsyncWrite + Unpin> Spoken<T> {
    fn say(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let written = ready!(Pin::new(&mut self.inner).poll_write(cx, &self.instead))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            drop(self.instead.split_to(written));
        }
        Poll::Ready(Ok(()))
    }

    /// Takes a wordless refusal over; else what is written is not its business.
    fn takes(&mut self, first: &[u8]) -> bool {
        let clean = std::mem::replace(&mut self.clean, false);
        if clean
            && self.answered.is_idle()
            && let Some(words) = words(first)
        {
            self.instead = words;
            return true;
        }
        false
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Spoken<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Spoken<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.say(cx))?;
        if self.takes(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.say(cx))?;
        if let Some(first) = parts.iter().find(|part| !part.is_empty())
            && self.takes(first)
        {
            return Poll::Ready(Ok(first.len()));
        }
        Pin::new(&mut self.inner).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.say(cx))?;
        ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
        self.clean = true;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.say(cx))?;
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::{Answered, Spoken, words};
    use tokio::io::AsyncWriteExt;

    const WORDLESS: &[u8] =
        b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\ndate: x\r\n\r\n";

    #[test]
    fn only_wordless_refusals_get_words() {
        assert!(words(WORDLESS).is_some_and(|words| words.ends_with(b"path and query\"}")));
        for other in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"[..],
            b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 431 X\r\ncontent-length: 3\r\n\r\nabc",
            b"HTTP/1.1 431 X\r\ncontent-length: 0\r\n",
            b"HTTP/1.1 4",
            b"",
            b"\xff",
        ] {
            assert_eq!(words(other), None, "{other:?}");
        }
    }

    #[tokio::test]
    async fn what_a_body_says_is_left_alone() {
        let (answered, mut wire) = (Answered::default(), Vec::new());
        let answering = answered.begin();
        let mut spoken = Spoken::new(&mut wire, answered.clone());
        spoken.write_all(WORDLESS).await.unwrap();
        spoken.flush().await.unwrap();
        drop(answering);
        // Behind something that was not flushed it belongs to that.
        spoken.write_all(b"x").await.unwrap();
        spoken.write_all(WORDLESS).await.unwrap();
        spoken.flush().await.unwrap();
        let untouched = [WORDLESS, b"x", WORDLESS].concat();
        spoken.write_all(WORDLESS).await.unwrap();
        spoken.shutdown().await.unwrap();
        assert!(wire.starts_with(&untouched));
        let said = String::from_utf8_lossy(&wire[untouched.len()..]).into_owned();
        assert!(
            said.contains("connection: close\r\n\r\n{\"error\":\"the request's head is too large"),
            "{said}"
        );
    }
}
