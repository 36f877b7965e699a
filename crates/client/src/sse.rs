//! Server-sent events.

use crate::error::{Error, Result};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use std::collections::VecDeque;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Event {
    /// The `event:` field, or empty.
    pub event: String,
    /// The `data:` lines, joined by newlines.
    pub data: String,
}

/// A larger event is an error: memory has a bound.
const MAX_EVENT: usize = 16 << 20;

/// Parses bytes in pieces of any size. Lines end in LF, CR or CRLF.
#[derive(Debug, Default)]
pub struct Parser {
    line: Vec<u8>,
    event: Event,
    has_data: bool,
    after_cr: bool,
    ready: VecDeque<Event>,
}

impl Parser {
    /// Takes the next bytes. Fails if an event is larger than 16 MiB.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        for &byte in bytes {
            let lf_of_crlf = byte == b'\n' && self.after_cr;
            self.after_cr = byte == b'\r';
            match byte {
                _ if lf_of_crlf => {}
                b'\n' | b'\r' => self.end_of_line(),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.event.data.len() > MAX_EVENT {
                return Err(Error::Protocol("an event is larger than 16 MiB".into()));
            }
        }
        Ok(())
    }

    /// The next complete event, if there is one.
    pub fn pop(&mut self) -> Option<Event> {
        self.ready.pop_front()
    }

    fn end_of_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if std::mem::take(&mut self.has_data) {
                self.ready.push_back(event);
            }
            return;
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => self.event.event = value.to_owned(),
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.has_data = true;
                self.event.data.push_str(value);
            }
            // Comments (an empty field name), ids and retry hints are ignored.
            _ => {}
        }
    }
}

/// The events in a body.
pub(crate) fn events(body: BoxStream<'static, Result<Bytes>>) -> BoxStream<'static, Result<Event>> {
    futures::stream::try_unfold((body, Parser::default()), |(mut body, mut parser)| async move {
        loop {
            if let Some(event) = parser.pop() {
                return Ok(Some((event, (body, parser))));
            }
            match body.try_next().await? {
                Some(bytes) => parser.push(&bytes)?,
                None => return Ok(None),
            }
        }
    })
    .boxed()
}

#[cfg(test)]
mod tests {
    use super::{Event, MAX_EVENT, Parser};

    fn parse(pieces: &[&[u8]]) -> Vec<Event> {
        let mut parser = Parser::default();
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece).unwrap();
            events.extend(std::iter::from_fn(|| parser.pop()));
        }
        events
    }

    fn event(event: &str, data: &str) -> Event {
        Event { event: event.into(), data: data.into() }
    }

    const STREAM: &str = ": ping\r\n\r\nevent: stdout\ndata: {\"chunk\":\"h\u{e9}\"}\n\n\
                          id: 7\ndata: a\ndata:b\r\rdata\n\n\
                          event: lost\n\ndata: last\r\n\r\n";

    fn expected() -> Vec<Event> {
        vec![event("stdout", "{\"chunk\":\"h\u{e9}\"}"), event("", "a\nb"), event("", ""), event("", "last")]
    }

    #[test]
    fn the_same_events_come_out_however_the_bytes_are_cut() {
        let bytes = STREAM.as_bytes();
        assert_eq!(parse(&[bytes]), expected());
        for cut in 0..=bytes.len() {
            assert_eq!(parse(&[&bytes[..cut], &bytes[cut..]]), expected(), "cut at {cut}");
        }
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(parse(&single), expected());
    }

    #[test]
    fn an_event_without_its_empty_line_is_not_delivered() {
        assert_eq!(parse(&[b"data: half"]), []);
        assert_eq!(parse(&[b"data: half\n"]), []);
    }

    #[test]
    fn an_endless_line_is_an_error() {
        let mut parser = Parser::default();
        assert!(parser.push(&vec![b'x'; MAX_EVENT]).is_ok());
        assert!(parser.push(b"x").is_err());
    }
}
