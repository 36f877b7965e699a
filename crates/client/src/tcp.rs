//! TCP connections to ports in a sandbox.

use crate::{
    error::{Error, Result},
    sandboxes::path,
    socket::{Socket, broken},
    transport::Client,
};
use bytes::Bytes;
use futures::{SinkExt, StreamExt, stream};
use keiki_types::SandboxId;
use serde::Deserialize;
use tokio_tungstenite::tungstenite::Message;

/// A connection. Each direction ends on its own; dropping both halves earlier resets the
/// connection.
pub struct Tcp {
    pub input: TcpInput,
    pub output: TcpOutput,
}

/// To the program in the sandbox.
pub struct TcpInput(stream::SplitSink<Socket, Message>);

/// From the program in the sandbox.
pub struct TcpOutput {
    messages: stream::SplitStream<Socket>,
    ended: bool,
}

impl Client {
    /// Connects to a TCP port in a sandbox, waking the sandbox if needed.
    ///
    /// # Errors
    /// Status 502 if nothing listens there.
    pub async fn tcp(&self, id: SandboxId, port: u16) -> Result<Tcp> {
        let (socket, _) = self.socket(&path(id, &format!("/tcp/{port}")), &[]).await?;
        let (input, messages) = socket.split();
        Ok(Tcp { input: TcpInput(input), output: TcpOutput { messages, ended: false } })
    }
}

impl TcpInput {
    /// Sends, waiting for room.
    pub async fn send(&mut self, bytes: Bytes) -> Result<()> {
        self.0.send(Message::Binary(bytes)).await.map_err(broken)
    }

    /// Ends this direction.
    pub async fn finish(&mut self) -> Result<()> {
        self.0.send(Message::Text(r#"{"eof":true}"#.into())).await.map_err(broken)
    }
}

impl TcpOutput {
    /// The next piece; none once the program has ended its direction.
    ///
    /// # Errors
    /// If the connection was reset or broke off.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        while !self.ended {
            match self.messages.next().await {
                Some(Ok(Message::Binary(bytes))) => return Ok(Some(bytes)),
                Some(Ok(Message::Text(text))) => self.ended = is_eof(&text)?,
                Some(Ok(Message::Close(_))) | None => {
                    return Err(Error::Protocol("the connection was cut off".into()));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(broken(error)),
            }
        }
        Ok(None)
    }

    /// Waits until the node closes the connection, once both directions have ended. Answers its
    /// pings meanwhile.
    pub async fn closed(&mut self) {
        while let Some(Ok(_)) = self.messages.next().await {}
    }
}

fn is_eof(text: &str) -> Result<bool> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Word {
        Eof { eof: bool },
        Failed { error: String },
    }
    match serde_json::from_str(text) {
        Ok(Word::Eof { eof }) => Ok(eof),
        Ok(Word::Failed { error }) => Err(Error::Connection(error)),
        Err(error) => Err(Error::Protocol(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::is_eof;
    use crate::error::Error;

    #[test]
    fn a_text_is_an_end_or_a_reset() {
        assert!(matches!(is_eof(r#"{"eof":true}"#), Ok(true)));
        assert!(matches!(is_eof(r#"{"error":"reset"}"#), Err(Error::Connection(_))));
        assert!(matches!(is_eof("x"), Err(Error::Protocol(_))));
    }
}
