//! Server-sent events, and decoding bytes into text.
//!
//! Clients split events at whatever their language calls a line end, and some decode bytes one at a time as Latin-1. So
//! payloads are pure ASCII JSON, where neither can go wrong, and the charset is named.

use axum::{
    http::{HeaderName, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::{Stream, StreamExt};
use keiki_api::Error;
use serde::Serialize;
use std::{convert::Infallible, fmt::Write, time::Duration};

/// A silent stream sends a comment this often, so that proxies keep it open and a client that is gone is noticed.
const PING_EVERY: Duration = Duration::from_secs(10);
/// A client that lost its stream sends the id of the last event it saw.
pub(super) const LAST_EVENT_ID: &str = "last-event-id";
/// The type of the answer.
const MEDIA_TYPE: &str = "text/event-stream; charset=utf-8";

/// One server-sent event of a stream, for the document.
#[derive(utoipa::ToSchema)]
#[allow(dead_code, reason = "only its description is used")]
pub(super) struct ServerSentEvent {
    /// The kind of event; default: `message`.
    #[schema(required = false)]
    event: String,
    /// The event's id, if it has one.
    #[schema(required = false)]
    id: String,
    /// JSON, or a line of text.
    data: String,
}

/// An answer that sends these events and ends with them.
pub(super) fn response(events: impl Stream<Item = Event> + Send + 'static) -> Response {
    let headers = [
        (header::CONTENT_TYPE, MEDIA_TYPE),
        (header::CACHE_CONTROL, "no-cache, no-transform"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    let pings = KeepAlive::new().interval(PING_EVERY).text("ping");
    (headers, Sse::new(events.map(Ok::<_, Infallible>)).keep_alive(pings)).into_response()
}

/// One event with a JSON payload.
pub(super) fn event(name: &str, payload: &impl Serialize) -> Event {
    numbered(None, name, payload)
}

/// One event, with its id where it has one.
pub(super) fn numbered(id: Option<String>, name: &str, payload: &impl Serialize) -> Event {
    let event = id.map_or_else(Event::default, |id| Event::default().id(id));
    // A name may come from a guest, and one with a line end would be two fields.
    event.event(name.replace(char::is_control, " ")).data(ascii_json(payload))
}

/// `event: error`.
pub(super) fn error(error: &Error) -> Event {
    event("error", &crate::errors::body(error))
}

/// JSON in ASCII: other characters are written as `\uXXXX`, outside the first plane as a pair.
pub(super) fn ascii_json(payload: &impl Serialize) -> String {
    // Only maps whose keys are not strings cannot be written; no payload has one.
    let json = serde_json::to_string(payload).unwrap_or_else(|_| "{}".into());
    if json.is_ascii() {
        return json;
    }
    let mut ascii = String::with_capacity(json.len() * 2);
    for c in json.chars() {
        if c.is_ascii() {
            ascii.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a String cannot fail.
                let _ = write!(ascii, "\\u{unit:04x}");
            }
        }
    }
    ascii
}

/// Turns the bytes of a stream into text, piece by piece, without splitting a character.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    /// The beginning of an incomplete character: at most three bytes.
    pending: Vec<u8>,
}

/// A piece of decoded text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Text {
    /// The text; bytes that are not UTF-8 are replaced.
    pub text: String,
    /// The exact bytes, if the text is not exact.
    pub exact: Option<Vec<u8>>,
}

impl Text {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self { text, exact: None },
            Err(error) => {
                let exact = error.into_bytes();
                Self { text: String::from_utf8_lossy(&exact).into_owned(), exact: Some(exact) }
            }
        }
    }
}

impl Decoder {
    /// Bytes held back.
    pub(super) fn held(&self) -> usize {
        self.pending.len()
    }

    /// Text of all complete characters; None if there are none.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Option<Text> {
        let mut whole = std::mem::take(&mut self.pending);
        whole.extend_from_slice(bytes);
        self.pending = whole.split_off(whole.len() - unfinished(&whole));
        (!whole.is_empty()).then(|| Text::new(whole))
    }

    /// What is left at the end of the stream.
    pub(super) fn finish(&mut self) -> Option<Text> {
        let rest = std::mem::take(&mut self.pending);
        (!rest.is_empty()).then(|| Text::new(rest))
    }
}

/// Bytes at the end that start an incomplete character.
pub(super) fn unfinished(bytes: &[u8]) -> usize {
    let tail = bytes.len().saturating_sub(3);
    let Some(start) = (tail..bytes.len()).rev().find(|at| bytes[*at] & 0b1100_0000 != 0b1000_0000) else {
        return 0;
    };
    match std::str::from_utf8(&bytes[start..]) {
        Err(error) if error.valid_up_to() == 0 && error.error_len().is_none() => bytes.len() - start,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::{Decoder, PING_EVERY, Text, ascii_json, event, numbered, response, unfinished};
    use futures::StreamExt;
    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
    use serde_json::json;

    /// Letters whose bytes are line ends in other encodings, a separator, and one outside the first plane.
    const TRAPS: &str = "х…Å\u{2028}é\u{85}\u{1F33A}\u{0b}\u{1c}\"\\\r\n";

    #[test]
    fn payloads_are_ascii_and_read_back() {
        let written = ascii_json(&json!({ "chunk": TRAPS }));
        assert!(written.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{written}");
        let read: serde_json::Value = serde_json::from_str(&written).unwrap();
        assert_eq!(read["chunk"], TRAPS);
        assert!(written.contains("\\u2028") && written.contains("\\ud83c\\udf3a"));
    }

    #[tokio::test]
    async fn an_event_is_one_frame() {
        let exit = event("exit\nid: 7", &json!({"exit_code": 0}));
        let sent = response(futures::stream::iter([exit, numbered(Some("1-2".into()), "x", &1)]));
        let sent = axum::body::to_bytes(sent.into_body(), 1024).await.unwrap();
        let expected = "event: exit id: 7\ndata: {\"exit_code\":0}\n\nid: 1-2\nevent: x\ndata: 1\n\n";
        assert_eq!(sent, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_stream_is_pinged() {
        let mut body = response(futures::stream::pending()).into_body().into_data_stream();
        let (first, begun) = (body.next().await.unwrap().unwrap(), tokio::time::Instant::now());
        assert_eq!(first, ": ping\n\n");
        assert_eq!(body.next().await.unwrap().unwrap(), ": ping\n\n");
        assert_eq!(begun.elapsed(), PING_EVERY);
    }

    #[test]
    fn characters_survive_byte_by_byte() {
        let mut decoder = Decoder::default();
        let mut read = String::new();
        for byte in TRAPS.bytes() {
            if let Some(piece) = decoder.push(&[byte]) {
                assert_eq!(piece.exact, None);
                read.push_str(&piece.text);
            }
        }
        assert_eq!(decoder.finish(), None);
        assert_eq!(read, TRAPS);
    }

    #[test]
    fn what_is_no_text_is_replaced_and_given_exactly() {
        let mut decoder = Decoder::default();
        let piece = decoder.push(b"a\xffb\xc3").unwrap();
        assert_eq!(piece, Text { text: "a\u{fffd}b".into(), exact: Some(b"a\xffb".to_vec()) });
        assert_eq!(decoder.push(b"\xa9").unwrap().text, "é");
        assert_eq!(decoder.push(b"\xe2\x80"), None);
        assert_eq!(decoder.finish().unwrap().exact.as_deref(), Some(b"\xe2\x80".as_slice()));
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        for (bytes, held) in [
            (&b""[..], 0),
            (b"a", 0),
            (b"\xc3", 1),
            (b"\xf0\x9f\x8c", 3),
            (b"\x80\x80", 0),
            (b"\xff", 0),
            (b"\xc3\xa9", 0),
        ] {
            assert_eq!(unfinished(bytes), held, "{bytes:x?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_arrive_exactly(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9)) {
            let mut decoder = Decoder::default();
            let mut read = Vec::new();
            let texts = pieces.iter().map(|piece| decoder.push(piece)).collect::<Vec<_>>();
            for text in texts.into_iter().chain([decoder.finish()]).flatten() {
                read.extend(text.exact.unwrap_or_else(|| text.text.into_bytes()));
            }
            prop_assert_eq!(read, pieces.concat());
        }

        #[test]
        fn any_text_in_any_pieces_is_text(text: String, cut in 1_usize..5) {
            let mut decoder = Decoder::default();
            for piece in text.as_bytes().chunks(cut) {
                prop_assert!(decoder.push(piece).is_none_or(|piece| piece.exact.is_none()));
            }
            prop_assert_eq!(decoder.finish(), None);
        }
    }
}
