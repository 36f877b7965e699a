//! Commands in a sandbox, buffered or streamed.

use crate::{
    error::{Error, Result},
    sandboxes::path,
    sse::Event,
    transport::Client,
};
use base64::Engine as _;
use bytes::Bytes;
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use keiki_types::{
    SandboxId,
    api::{ErrorBody, ExecRequest, ExecResult},
};
use reqwest::Method;
use serde::Deserialize;

/// Output of a command. `Exit` is last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    Stdout(Bytes),
    Stderr(Bytes),
    /// As a shell reports it: 128+n for signal n, 127 not found, 126 not executable.
    Exit(i32),
}

/// The output of a command. If it breaks off without `Exit`, the last item is
/// [`Error::Interrupted`]. Dropping the stream before that kills the command and its children,
/// unless it runs in the background.
pub type ExecStream = BoxStream<'static, Result<ExecEvent>>;

impl Client {
    /// Runs a command to its end. Keeps 16 MiB of each stream; see `truncated`.
    ///
    /// # Errors
    /// [`Error::CommandTimeout`] if it timed out. A command that fails is not an error.
    pub async fn exec(&self, id: SandboxId, request: &ExecRequest) -> Result<ExecResult> {
        self.post(&path(id, "/exec"), request).await.map_err(|error| match error {
            Error::Api { status: 504, message, .. } => Error::CommandTimeout(message),
            other => other,
        })
    }

    /// Starts a command and returns its output, byte for byte and without limit.
    pub async fn exec_stream(&self, id: SandboxId, request: &ExecRequest) -> Result<ExecStream> {
        let post = self.request(Method::POST, &path(id, "/exec/stream")).json(request);
        self.events_of(post).await.map(output)
    }
}

/// The output in the events of a command.
pub(crate) fn output(events: BoxStream<'static, Result<Event>>) -> ExecStream {
    let next = |events: Option<BoxStream<'static, Result<Event>>>| async move {
        let mut events = events?;
        loop {
            let event = events.next().await.unwrap_or(Err(Error::Interrupted));
            match event.and_then(|event| decode(&event)).transpose() {
                None => {}
                Some(last @ (Ok(ExecEvent::Exit(_)) | Err(_))) => return Some((last, None)),
                Some(chunk) => return Some((chunk, Some(events))),
            }
        }
    };
    stream::unfold(Some(events), next).boxed()
}

#[derive(Deserialize)]
struct Chunk {
    chunk: String,
    #[serde(default)]
    base64: Option<String>,
}

#[derive(Deserialize)]
struct Exit {
    exit_code: i32,
}

/// None for events unknown to this version.
fn decode(event: &Event) -> Result<Option<ExecEvent>> {
    let unclear = |error: serde_json::Error| Error::Protocol(format!("{} event: {error}", event.event));
    let chunk = || -> Result<Bytes> {
        let chunk: Chunk = serde_json::from_str(&event.data).map_err(unclear)?;
        match chunk.base64 {
            None => Ok(chunk.chunk.into_bytes().into()),
            Some(text) => base64::engine::general_purpose::STANDARD
                .decode(text)
                .map(Bytes::from)
                .map_err(|error| Error::Protocol(format!("{} event: {error}", event.event))),
        }
    };
    match event.event.as_str() {
        "stdout" => Ok(Some(ExecEvent::Stdout(chunk()?))),
        "stderr" => Ok(Some(ExecEvent::Stderr(chunk()?))),
        "exit" => {
            let exit: Exit = serde_json::from_str(&event.data).map_err(unclear)?;
            Ok(Some(ExecEvent::Exit(exit.exit_code)))
        }
        "error" => {
            let ErrorBody { error, .. } = serde_json::from_str(&event.data).map_err(unclear)?;
            let timeout = error.to_lowercase().contains("timeout");
            Err(if timeout { Error::CommandTimeout(error) } else { Error::Command(error) })
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::{ExecEvent, decode, output};
    use crate::{
        error::{Error, Result},
        sse::Event,
    };
    use bytes::Bytes;
    use futures::{StreamExt, stream};

    fn event(event: &str, data: &str) -> Event {
        Event { event: event.into(), data: data.into() }
    }

    #[test]
    fn chunks_are_text_or_exact_bytes() {
        let text = decode(&event("stdout", r#"{"chunk":"h\u00e9"}"#)).unwrap();
        assert_eq!(text, Some(ExecEvent::Stdout(Bytes::from("h\u{e9}"))));
        let raw = decode(&event("stderr", r#"{"chunk":"\ufffd","base64":"/wA="}"#)).unwrap();
        assert_eq!(raw, Some(ExecEvent::Stderr(Bytes::from_static(&[0xff, 0]))));
        assert!(decode(&event("stdout", r#"{"chunk":"","base64":"?"}"#)).is_err());
        assert!(decode(&event("exit", "{}")).is_err());
        assert!(decode(&event("news", "?")).unwrap().is_none());
    }

    #[test]
    fn a_timeout_is_told_from_other_errors() {
        let timeout = decode(&event("error", r#"{"error":"command timeout after 5s"}"#));
        assert!(matches!(timeout, Err(Error::CommandTimeout(_))));
        assert!(matches!(decode(&event("error", r#"{"error":"no shell"}"#)), Err(Error::Command(_))));
    }

    #[tokio::test]
    async fn a_stream_without_exit_is_interrupted() {
        let events: Vec<Result<Event>> = vec![Ok(event("stdout", r#"{"chunk":"a"}"#))];
        let all: Vec<_> = output(stream::iter(events).boxed()).collect().await;
        assert_eq!(all.len(), 2);
        assert!(matches!(all[1], Err(Error::Interrupted)));
    }
}
